"""Hugging Face causal language models as units that can stream. The only home of `transformers` (tokenizers:
`data`)."""

from megatrain.model.learn import port_model
from megatrain.model.load import causal_lm_from_config, load_causal_lm
from megatrain.model.ported import PortedModel, Sides
from megatrain.model.ports import Call

__all__ = ["Call", "PortedModel", "Sides", "causal_lm_from_config", "load_causal_lm", "port_model"]
