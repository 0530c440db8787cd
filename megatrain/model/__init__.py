"""Hugging Face causal language models as units that can stream. The only home of `transformers` (tokenizers:
`data`)."""

from megatrain.model.load import causal_lm_from_config, load_causal_lm
from megatrain.model.ported import PortedModel, port_model
from megatrain.model.ports import Call

__all__ = ["Call", "PortedModel", "causal_lm_from_config", "load_causal_lm", "port_model"]
