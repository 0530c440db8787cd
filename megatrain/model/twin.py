"""Twins: a model's own architecture at test size, so that it can be checked in a fraction of a second.

`shrink` makes a small config of the same kind: every switch stays (activations, caps, biases, rope, patterns of
layers, dropout), every size falls (widths, heads, experts, vocabulary, windows), and of the layers the fewest stay
that show each kind once, in their order. `twin_of` builds it, with noise on every parameter so that no mistake hides
behind ones and zeros.

Rules go by field names and values, never by model type; relations that code relies on (width = heads x head size, sums
of head sizes, divisibility) are kept. Since no rule knows every architecture, a candidate is *tried*: built, compared
in its kinds of layers with the full depth, and run on a few tokens. If that fails, gentler rules follow, in a fixed
order. Left out: what a twin is compared with (`train.verify`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError, typed_line
from megatrain.model.load import quiet
from megatrain.model.narrow import EFFORTS, TOKEN, Effort, Fields, items, narrowed

MAX_PARAMETERS = 50_000_000
TRIAL_TOKENS = 9
MAX_PREFIX = 16
"""Most layers of a prefix that is tried where no shorter choice shows every kind."""

MOST_SAID = 160
"""Characters of what the library says about a config that it cannot build."""

CPU_KERNELS = ("eager", "sdpa")
CHECKPOINT = (
    *("quantization_config", "auto_map", "dtype", "torch_dtype"),
    *("id2label", "label2id", "transformers_version", "_name_or_path"),
)
"""Fields that say something of a checkpoint, not of the architecture."""
DROPOUT = re.compile(r"\w*(dropout|pdrop|drop_path|jitter)\w*")

StockConfig = PreTrainedConfig
StockModel = PreTrainedModel
"""What is compared with: a model that runs the library's own code."""


def shrink(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedConfig:
    """A config of the same class and kind at test size; `config` is not changed. A function of its arguments alone.

    kind: the class of the model; what `AutoModelForCausalLM` chooses if it is not given. Raises `ModelError` when
    nothing that was tried builds and runs.
    """
    whole = _plain(config)
    failures: list[str] = []
    for effort in EFFORTS:
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                return _shrunk(config, whole, kind, effort)
        except Exception as error:  # whatever foreign code raises on sizes that it cannot take
            if not failures:
                _refuse_unbuildable(config, kind)
            failures.append(typed_line(error)[:MOST_SAID])
    raise ModelError(f"no small twin of it builds and runs ({failures[0]})", where=f"model {type(config).__name__}")


def _refuse_unbuildable(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> None:
    """Raise `ModelError` if the model cannot be built as it stands either: then no size is to blame."""
    try:
        _skeleton(config, kind)
    except Exception as error:
        where = f"model {type(config).__name__}"
        raise ModelError(f"the library cannot build it ({typed_line(error)[:MOST_SAID]})", where=where) from error


def twin_of(
    config: PreTrainedConfig, seed: int, attention: str | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A real model of `shrink(config)`: float32, on the cpu, in training mode, every parameter perturbed from `seed`.

    attention: the attention kernel; the config's own if it is not given. kind: as for `shrink`, which raises the same
    errors.
    """
    return twin_from(shrink(config, kind), seed, attention or config._attn_implementation, kind)


def twin_from(
    small: PreTrainedConfig, seed: int, attention: str | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """`twin_of` for a config that is small already. A kernel that no cpu has gives way to the model's default."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = built(small, kind, attention if attention in CPU_KERNELS else None)
        perturb(model, seed)
        model.train()
    return model


def with_dropout(config: PreTrainedConfig, rate: float) -> PreTrainedConfig:
    """The same config with this rate in every kind of dropout and jitter that it has, and no layer ever dropped.

    A field that holds a whole number stays one, since some configs insist on that."""
    fields = _plain(config)
    nodes = [fields]
    for node in nodes:
        nodes += [value for value in node.values() if isinstance(value, dict)]
        node.update({name: type(value)(rate) for name, value in node.items() if _is_rate(name, value)})
        node.update({name: type(value)(0) for name, value in node.items() if name.endswith("layerdrop")})
    return _parsed(config, fields)


def dropout_rates(config: PreTrainedConfig) -> list[float]:
    """Every rate of dropout and jitter that a config has."""
    nodes = [_plain(config)]
    for node in nodes:
        nodes += [value for value in node.values() if isinstance(value, dict)]
    return [float(value) for node in nodes for name, value in node.items() if _is_rate(name, value)]


def _is_rate(name: str, value: object) -> bool:
    return DROPOUT.fullmatch(name) is not None and isinstance(value, int | float) and not isinstance(value, bool)


def built(config: PreTrainedConfig, kind: type[PreTrainedModel] | None, attention: str | None) -> PreTrainedModel:
    """A fresh float32 model of a config, by its own initialiser. `config` is not changed."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if attention is not None:
        options["attn_implementation"] = attention
    own = copy.deepcopy(config)
    made: PreTrainedModel
    with quiet():
        made = AutoModelForCausalLM.from_config(own, **options) if kind is None else kind._from_config(own, **options)
    return made


def perturb(model: nn.Module, seed: int) -> None:
    """Add seeded noise to every parameter, and to the saved buffers that hold small numbers.

    So no mistake hides behind scales of one and biases of zero, and no cap behind weights too small to reach it.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and bool((buffer.abs() <= 10).all()):
                buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.05)


# Trying ------------------------------------------------------------------------------------------------------------


def _shrunk(
    config: PreTrainedConfig, whole: Fields, kind: type[PreTrainedModel] | None, effort: Effort
) -> PreTrainedConfig:
    narrow = narrowed(whole, effort)
    wide = _parsed(config, narrow)
    skeleton = _skeleton(wide, kind)
    stacks = _stacks(skeleton, config)
    kinds = [kinds_of_layers(skeleton, wide, stack) for stack in stacks]
    for stack, every in zip(stacks, kinds, strict=True):
        node = _at(narrow, stack.path)
        node.update(with_layers(node, stack.depth, layers_to_keep(every, effort.depth)))
    small = _parsed(config, narrow)
    skeleton = _skeleton(small, kind)
    numel = sum(parameter.numel() for parameter in skeleton.parameters())
    if numel > MAX_PARAMETERS:
        raise ModelError(f"its twin would still have {numel:,} parameters")
    for stack, every in zip(stacks, kinds, strict=True):
        if set(every) - set(kinds_of_layers(skeleton, small, stack)):
            raise ModelError("its twin lacks a kind of layer")
    _try(built(small, kind, None))
    return small


def _try(model: PreTrainedModel) -> None:
    """Run the model on a few ordinary tokens; raise whatever it raises, or `ModelError` if logits are not finite."""
    ids = torch.tensor(ordinary_tokens(model.config)[:TRIAL_TOKENS]).unsqueeze(0)
    with torch.no_grad(), quiet():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("its twin's logits are not finite")


def ordinary_tokens(config: PreTrainedConfig) -> list[int]:
    """Token ids that have no special meaning to a model (padding, the place of an image)."""
    special: set[int] = set()
    nodes = [_plain(config)]
    for node in nodes:
        for name, value in node.items():
            if TOKEN.fullmatch(name):
                special |= {item for item in items(value) if isinstance(item, int)}
            nodes += [value] if isinstance(value, dict) else []
    text = _plain(config.get_text_config())
    vocabulary = min(text[name] for name in ("vocab_size", "unpadded_vocab_size") if text.get(name))
    return [token for token in range(vocabulary) if token not in special]


def _skeleton(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> PreTrainedModel:
    with torch.device("meta"):
        return built(config, kind, None)


def _plain(config: PreTrainedConfig) -> Fields:
    """The fields of a config, nested ones too, without what belongs to its checkpoint."""
    fields: Fields = _string_keyed(config.to_dict())
    nodes = [fields]
    for node in nodes:
        for name in CHECKPOINT:
            node.pop(name, None)
        if not node.get("output_attentions"):
            node.pop("output_attentions", None)  # some nested configs write it and do not read it
        nodes += [value for value in node.values() if isinstance(value, dict)]
    return fields


def _string_keyed(value: Any) -> Any:
    """A copy of nested fields, with the numbers of layers that some are keyed by as text."""
    if isinstance(value, dict):
        return {str(key): _string_keyed(inner) for key, inner in value.items()}
    return [_string_keyed(item) for item in value] if isinstance(value, list) else value


def _parsed(config: PreTrainedConfig, fields: Fields) -> PreTrainedConfig:
    with quiet():
        parsed: PreTrainedConfig = type(config).from_dict(copy.deepcopy(fields))
    parsed._experts_implementation = config._experts_implementation
    return parsed


# Depth -------------------------------------------------------------------------------------------------------------

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers that one config, at `path` in the whole, describes: how many, in which module lists, and the fields that
    hold an entry for each."""

    path: Path
    depth: int
    modules: tuple[str, ...]
    fields: tuple[str, ...]


def _stacks(model: PreTrainedModel, config: PreTrainedConfig, path: Path = ()) -> list[_Stack]:
    """Every stack of layers, of nested configs too."""
    found: list[_Stack] = []
    plain = _plain(config)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    counts = [value for name, value in plain.items() if LAYER_COUNT.fullmatch(name) and isinstance(value, int)]
    for depth in (getattr(config, "decoder_layers", None), getattr(config, "num_hidden_layers", None), *counts):
        modules = tuple(name for name in outer if len(lists[name]) == depth)
        if depth and modules:
            fields = tuple(name for name, value in plain.items() if _entry_each(name, value, depth))
            found.append(_Stack(path, depth, modules, fields))
            break
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            found += _stacks(model, inner, (*path, name))
    return found


def _at(fields: Fields, path: Path) -> Fields:
    for name in path:
        fields = fields[name]
    return fields


def kinds_of_layers(model: PreTrainedModel, config: PreTrainedConfig, stack: _Stack) -> list[object]:
    """What tells the layers of a stack apart, layer by layer: classes, parameters, switches, and their entries in the
    config."""
    node = _at(_plain(config), stack.path)
    modules = [list(model.get_submodule(name).children()) for name in stack.modules]
    depth = min((len(layers) for layers in modules), default=1)
    entries = [value for name in stack.fields if len(value := node[name]) == depth]
    return [
        (tuple(_looks(layers[i]) for layers in modules), json.dumps([each[i] for each in entries], default=str))
        for i in range(depth)
    ]


def _looks(layer: nn.Module) -> tuple[object, ...]:
    """What can be seen of a layer but its number: classes, shapes, switches, words, and what is absent."""
    looks: list[object] = []
    for name, module in layer.named_modules():
        switches = sorted(
            (key, value if isinstance(value, bool | str) else value is None)
            for key, value in vars(module).items()
            if not key.startswith("_")
        )
        shapes = [(key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False)]
        looks.append((name, type(module).__qualname__, repr(switches), repr(shapes)))
    return tuple(looks)


def layers_to_keep(kinds: Sequence[object], depth: str) -> list[int]:
    """Numbers of the layers that show every kind: the first of each, or all up to the last of these; at least two."""
    firsts = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    if depth == "prefix":
        firsts = list(range(firsts[-1] + 1))
    others = [index for index in range(len(kinds)) if index not in firsts]
    return sorted([*firsts, *others[: max(0, 2 - len(firsts))]])[:MAX_PREFIX]


LAYER_COUNT = re.compile(r"(num_)?(hidden_|decoder_|encoder_|n_)?layers?|num_blocks|num_(de|en)coder_layers|depth")
LEADING = re.compile(r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index")
TRAILING = re.compile(r"num_kv_shared_layers")
LAST = re.compile(r"moe_layer_end_index")
LAYER_NUMBERS = re.compile(r"\w*layer\w*|\w*_(idx|id)s")


def with_layers(node: Fields, depth: int, chosen: Sequence[int]) -> Fields:
    """The fields that change when of `depth` layers only the `chosen` stay."""
    changed: Fields = {}
    for name, value in node.items():
        if LAYER_COUNT.fullmatch(name) and value == depth:
            changed[name] = len(chosen)
        elif LEADING.fullmatch(name) and isinstance(value, int):
            changed[name] = sum(layer < value for layer in chosen)
        elif TRAILING.fullmatch(name) and isinstance(value, int):
            changed[name] = sum(layer >= depth - value for layer in chosen)
        elif LAST.fullmatch(name) and isinstance(value, int) and value >= 0:
            changed[name] = sum(layer <= value for layer in chosen) - 1
        elif name == "per_layer_config" and isinstance(value, dict):
            places = {layer: place for place, layer in enumerate(chosen)}
            layers = {int(key): inner for key, inner in value.items()}
            changed[name] = {places[layer]: inner for layer, inner in layers.items() if layer in places}
        elif isinstance(value, list) and (shorter := _shorter(name, value, depth, chosen)) is not None:
            changed[name] = shorter
    return changed


def _entry_each(name: str, value: object, depth: int) -> bool:
    """Whether a field is a list with an entry for each layer."""
    return isinstance(value, list) and len(value) == depth and not _are_layers(name, value, depth)


def _are_layers(name: str, value: list[Any], depth: int) -> bool:
    """Whether a list holds numbers of layers, in order."""
    numbers = all(isinstance(item, int) and 0 <= item < depth for item in value)
    return LAYER_NUMBERS.fullmatch(name) is not None and numbers and value == sorted(set(value))


def _shorter(name: str, value: list[Any], depth: int, chosen: Sequence[int]) -> list[Any] | None:
    """A list about layers, about the chosen ones; `None` for a list about something else."""
    if value and _are_layers(name, value, depth):
        return [place for place, layer in enumerate(chosen) if layer in value]
    if len(value) == depth:
        return [value[layer] for layer in chosen]
    if value and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) for item in value):
        spread = [each for pattern, times in value for _ in range(times) for each in pattern]  # [[pattern, times], ...]
        return [[[spread[layer] for layer in chosen], 1]] if len(spread) == depth else None
    return None
