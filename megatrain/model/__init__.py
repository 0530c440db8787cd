"""Hugging Face causal language models as units that can stream. The only home of `transformers` (tokenizers:
`data`)."""

from megatrain.model.arguments import Arguments
from megatrain.model.chosen import Answering, Keeping, Stored
from megatrain.model.compiled import require_compiler, spent
from megatrain.model.freeze import freeze_parameters
from megatrain.model.fresh import FreshSource
from megatrain.model.hub import model_named
from megatrain.model.learn import buffer_dtypes, port_model, refuse_other_kinds
from megatrain.model.load import causal_lm_from_config, load_causal_lm
from megatrain.model.packable import only_single_rows, why_not_packable
from megatrain.model.ported import PortedModel, Sides
from megatrain.model.ports import Call
from megatrain.model.pretrained import PretrainedSource
from megatrain.model.sources import Masters, ModelSource, Progress, Source
from megatrain.model.speaker import TextStream, speak
from megatrain.model.uses import Uses, is_wrapped, tensors_in
from megatrain.model.written import WrittenModel, WrittenTensor

__all__ = [
    "Answering",
    "Arguments",
    "Call",
    "FreshSource",
    "Keeping",
    "Masters",
    "ModelSource",
    "PortedModel",
    "PretrainedSource",
    "Progress",
    "Sides",
    "Source",
    "Stored",
    "TextStream",
    "Uses",
    "WrittenModel",
    "WrittenTensor",
    "buffer_dtypes",
    "causal_lm_from_config",
    "freeze_parameters",
    "is_wrapped",
    "load_causal_lm",
    "model_named",
    "only_single_rows",
    "port_model",
    "refuse_other_kinds",
    "require_compiler",
    "speak",
    "spent",
    "tensors_in",
    "why_not_packable",
]
