"""Generates text with a streamed model, by transformers' own `generate` around a streamed forward.

transformers implements decoding (greedy, sampling, beams, penalties, stopping) and each model family's cache; none of
it is repeated here. `speak` wraps the skeleton of a ported model as one that can generate: a shallow copy whose class
is a subclass of the model's own with the same forward signature, so every argument is checked and prepared as usual.
Only the body of the forward is replaced, by `LastLogits`.

The cache that `generate` makes (keys and values, or recurrent states) reaches the layers through the prologue like
any other argument, and each layer writes its part in place. It is on the device, is not in the ledger, and is
freed when the call ends. Logits come from `engine.streamer`; attentions and hidden states are not available.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel, TextStreamer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils.generic import ModelOutput

from megatrain.errors import BatchError, ConfigError, ModelError, NonFinite, OutOfDeviceMemory, first_line
from megatrain.model.ports import PortedModel
from megatrain.model.weight_sources import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LastLogits = Callable[[Mapping[str, Any], int], Tensor]
"""(arguments of a forward, including `input_ids` int64[rows, length]; number of last positions, 0 for all) -> logits
float32[rows, positions, vocabulary] on the device."""

WHERE = "generate"

DEFAULT_NEW_TOKENS = 20
"""transformers' default when no maximum length is given."""

NOT_KEPT = ("output_attentions", "output_hidden_states")
"""Outputs besides logits that a streamed model cannot return."""


def speak(
    ported: PortedModel,
    last_logits: LastLogits,
    device: torch.device,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
) -> Any:
    """Run transformers' `generate` on `input_ids` int64[rows, length] with its `options`, taking logits from
    `last_logits`.

    attention_mask: int64[rows, length], 0 for padding, which is on the left. Uses no gradients and the global random
    state, and logs nothing. Before computing it raises `BatchError` for a text that could exceed the model's positions
    or a mask of another shape, `ConfigError` for an option that transformers refuses, and `ModelError` for a model
    without `generate`; later `NonFinite` for logits that are not finite.
    """
    kind: Any = type(ported.skeleton)
    if not kind.can_generate():
        raise ModelError("transformers cannot generate with it", where=f"model {kind.__name__}")
    model = _dressed(ported, last_logits, device)
    options = {"disable_compile": True, **options}  # a streamed model is not one graph
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.is_meta:
            raise BatchError("attention_mask is not a tensor with values", where=WHERE, fix="give int64[rows, length]")
        if attention_mask.shape != input_ids.shape:
            what = f"attention_mask is {list(attention_mask.shape)}, but input_ids are {list(input_ids.shape)}"
            raise BatchError(what, where=WHERE)
        if ended := (attention_mask[:, -1] == 0).nonzero().flatten().tolist():
            what = f"attention_mask hides the end of row {ended[0]}"
            raise BatchError(what, where=WHERE, fix="pad on the left (tokenizer.padding_side = 'left')")
        options["attention_mask"] = attention_mask.to(device)
    if not kind._supports_default_dynamic_cache():
        options["use_cache"] = False  # a cache of its own kind, which the layers do not update in place
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _refuse_outgrown(ported, model.generation_config, input_ids.shape[1], options)
            return model.generate(input_ids.to(device), **options)
    except OutOfDeviceMemory as error:
        error.fix = "use fewer rows, a shorter text, or use_cache=False"
        raise
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(first_line(error), where=WHERE) from error


class TextStream(TextStreamer):
    """Passes the new text of one row to `heard` as it is decoded, at the latest when a word is complete. A call may
    pass an empty string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, heard: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._heard = heard

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._heard(text)


# Wrapping ----------------------------------------------------------------------------------------------------------


def _dressed(ported: PortedModel, last_logits: LastLogits, device: torch.device) -> Any:
    """The skeleton as a model that can generate. It shares all modules with the skeleton, which stays unchanged."""
    model: Any = copy.copy(ported.skeleton)
    model.__class__ = _speaking(model.__class__)
    model.__dict__.update(
        training=False,
        generation_config=copy.deepcopy(ported.skeleton.generation_config),
        _last_logits=last_logits,
        _place=device,
    )
    return model


@functools.cache
def _speaking(kind: Any) -> type[PreTrainedModel]:
    """A subclass of a model class whose forward asks `_last_logits`, and whose device is the one that computes."""

    def forward(self: Any, *args: Any, **inputs: Any) -> ModelOutput:
        return _answer(self._last_logits, inputs)

    functools.update_wrapper(forward, kind.forward)
    forward.__dict__["__signature__"] = _with_logits_to_keep(inspect.signature(kind.forward))
    members = {
        "forward": forward,
        "device": property(lambda self: self._place),
        "__module__": kind.__module__,
        "_supports_mm_encoder_outputs": lambda self: False,  # the prologue encodes images: it has the weights
        "_expand_inputs_for_generation": _one_answer(kind),
    }
    return type(f"Speaking{kind.__name__}", (kind,), members)


def _one_answer(kind: Any) -> Callable[..., Any]:
    """The model's own repetition of inputs for several beams or answers, refused with images: their parts are not as
    many as rows, so the library repeats what its encoder returns, which only the prologue computes here."""

    def expanded(self: Any, expand_size: int = 1, **inputs: Any) -> Any:
        brings = (name for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL if inputs.get(name) is not None)
        if expand_size > 1 and (name := next(brings, None)):
            fix = "leave num_beams and num_return_sequences out"
            raise ConfigError(f"{name} goes with one answer and no beams", where=WHERE, fix=fix)
        repeated = inspect.getattr_static(kind, "_expand_inputs_for_generation").__get__(self, kind)
        return repeated(expand_size, **inputs)  # in transformers 5.17 a static method

    return expanded


def _with_logits_to_keep(signature: inspect.Signature) -> inspect.Signature:
    """Add the parameter if the model lacks it: `generate` then says how many positions it will read."""
    if "logits_to_keep" in signature.parameters:
        return signature
    parameters = list(signature.parameters.values())
    rest = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    named = [parameter for parameter in parameters if parameter not in rest]
    kept = inspect.Parameter("logits_to_keep", inspect.Parameter.KEYWORD_ONLY, default=0)
    return signature.replace(parameters=[*named, kept, *rest])


def _answer(last_logits: LastLogits, inputs: dict[str, Any]) -> ModelOutput:
    """One forward call from `generate`."""
    for name in NOT_KEPT:
        if inputs.pop(name, None):
            raise ConfigError(f"{name} is not available from a streamed model", where=WHERE, fix="leave it out")
    if inputs.get("input_ids") is None:
        raise ConfigError("needs input_ids, not embeddings", where=WHERE)
    caches = {name: value for name, value in inputs.items() if isinstance(value, Cache)}
    if inputs.get("use_cache") and not caches:
        raise ModelError("uses an unknown kind of cache", where=WHERE, fix="pass use_cache=False")
    kept = inputs.pop("logits_to_keep", 1)
    inputs.pop("return_dict", None)
    logits = last_logits({name: value for name, value in inputs.items() if value is not None}, kept)
    if bool(logits.isnan().any()):
        raise NonFinite("the logits are not finite", where=WHERE, fix="inspect the weights")
    return ModelOutput(logits=logits, **caches)


def _refuse_outgrown(ported: PortedModel, default: GenerationConfig, length: int, options: Mapping[str, Any]) -> None:
    """Raise `BatchError` if `length` tokens plus all that may be generated exceed the model's positions."""
    limit = ported.structure.max_positions
    if limit is None:
        return
    given = options.get("generation_config")

    def setting(name: str) -> int | None:
        values = (options.get(name), getattr(given, name, None), getattr(default, name, None))
        return next((value for value in values if value is not None), None)

    new, total = setting("max_new_tokens"), setting("max_length")
    longest = length + new if new is not None else total
    if longest is None:
        longest = min(length + DEFAULT_NEW_TOKENS, max(limit, length + 1))
    if longest > limit:
        raise BatchError(
            f"a prompt of {length:,} tokens and up to {longest - length:,} more exceed the model's {limit:,} positions",
            where=WHERE,
            fix=f"set max_new_tokens={limit - length} or less" if length < limit else "use a shorter prompt",
        )
