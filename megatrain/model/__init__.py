"""Splits Hugging Face causal language models into units that can stream. The only room that imports `transformers`
(besides `data`, for tokenizers)."""

from megatrain.model.adapters import AdaptedSource, base_of, load_trained, lora_config, lora_named, pretrained_source
from megatrain.model.carried import WrittenTensor, carried_by
from megatrain.model.checkpoint_names import Written, written_of, written_parameters, written_precision
from megatrain.model.forward_arguments import Arguments
from megatrain.model.freeze import freeze_parameters
from megatrain.model.generate import TextStream, speak
from megatrain.model.hub import model_behind, model_named
from megatrain.model.initialize import FreshSource
from megatrain.model.merge_adapters import MergedSource, WeightsInMemory
from megatrain.model.moved_elements import MovedElements, groups
from megatrain.model.packed_sequences import only_single_rows, why_not_packable
from megatrain.model.ports import Call, PortedModel
from megatrain.model.pretrained import PretrainedSource, non_finite_weights
from megatrain.model.saved_activations import Answering, Keeping, Stored
from megatrain.model.split_into_units import buffer_dtypes, port_model, refuse_other_kinds
from megatrain.model.weight_reads import Uses, is_wrapped
from megatrain.model.weight_sources import Fills, InFiles, Masters, ModelSource, Progress, Source, listed

__all__ = [
    "AdaptedSource",
    "Answering",
    "Arguments",
    "Call",
    "Fills",
    "FreshSource",
    "InFiles",
    "Keeping",
    "Masters",
    "MergedSource",
    "ModelSource",
    "MovedElements",
    "PortedModel",
    "PretrainedSource",
    "Progress",
    "Source",
    "Stored",
    "TextStream",
    "Uses",
    "WeightsInMemory",
    "Written",
    "WrittenTensor",
    "base_of",
    "buffer_dtypes",
    "carried_by",
    "freeze_parameters",
    "groups",
    "is_wrapped",
    "listed",
    "load_trained",
    "lora_config",
    "lora_named",
    "model_behind",
    "model_named",
    "non_finite_weights",
    "only_single_rows",
    "port_model",
    "pretrained_source",
    "refuse_other_kinds",
    "speak",
    "why_not_packable",
    "written_of",
    "written_parameters",
    "written_precision",
]
