"""Shrinks a model's own architecture to test size, so that it can be checked in a fraction of a second.

`shrink` makes a small config of the same kind: switches stay (activations, caps, biases, rope, layer patterns,
dropout), sizes shrink (widths, heads, experts, vocabulary, windows), and only as many layers remain, in their order, as
it takes to have each kind once. `twin_of` builds it, with noise on every parameter so that no error hides behind ones
and zeros. `train.parity` compares twins.

Rules depend on field names and values, never on the model type, and preserve relations that code relies on (width =
heads x head size, sums of head sizes, divisibility). Since no rule knows every architecture, each candidate is *tried*:
built, checked to have all kinds of layers, and run on a few tokens. If that fails, gentler rules follow in a fixed
order.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, gcd
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError, typed_line
from megatrain.model.architecture import auto_class, ropes_of
from megatrain.model.recomputed_encoders import outermost_module_lists
from megatrain.model.skeleton import on_the_cpu
from megatrain.model.weight_sources import quiet

Fields = dict[str, Any]
"""`to_dict()` of a config, or of one nested in it."""

MAX_PARAMETERS = 50_000_000
TRIAL_TOKENS = 9
MAX_PREFIX = 16
"""Longest prefix of layers that is tried if no shorter choice has every kind."""

MOST_SAID = 160
"""Longest quote of the library's error about a config, in characters."""

CPU_KERNELS = ("eager", "sdpa")
CHECKPOINT = (
    *("quantization_config", "auto_map", "dtype", "torch_dtype"),
    *("id2label", "label2id", "transformers_version", "_name_or_path"),
)
"""Config fields about a checkpoint, not about the architecture."""
DROPOUT = re.compile(r"\w*(dropout|pdrop|drop_path|jitter)\w*")

StockConfig = PreTrainedConfig
StockModel = PreTrainedModel
"""The reference: a model that runs the library's own code."""


def shrink(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedConfig:
    """A config of the same class and kind at test size; deterministic, and `config` is not changed.

    kind: the model's class; by default that of `auto_class`. Raises `ModelError` if no candidate builds and
    runs.
    """
    whole = fields_of(config)
    failures: list[str] = []
    for effort in EFFORTS:
        try:
            with torch.random.fork_rng(devices=[]), on_the_cpu():
                return _shrunk(config, whole, kind, effort)
        except Exception as error:  # whatever foreign code raises for unsupported sizes
            if not failures:
                _refuse_unbuildable(config, kind)
            failures.append(typed_line(error)[:MOST_SAID])
    raise ModelError(f"no small twin of it builds and runs ({failures[0]})", where=f"model {type(config).__name__}")


def _refuse_unbuildable(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> None:
    """Raise `ModelError` if the model cannot be built at full size either: then shrinking is not to blame."""
    try:
        _skeleton(config, kind)
    except Exception as error:
        where = f"model {type(config).__name__}"
        raise ModelError(f"transformers cannot build it ({typed_line(error)[:MOST_SAID]})", where=where) from error


def twin_of(
    config: PreTrainedConfig, seed: int, attention: str | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """A model of `shrink(config)`: float32, on the CPU, in training mode, every parameter perturbed from `seed`.

    attention: the attention kernel; by default the config's. kind, errors: see `shrink`.
    """
    return twin_from(shrink(config, kind), seed, attention or config._attn_implementation, kind)


def twin_from(
    small: PreTrainedConfig, seed: int, attention: str | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """`twin_of` for a config that is already small. A kernel that no CPU has is replaced by the model's default."""
    with torch.random.fork_rng(devices=[]), on_the_cpu():
        torch.default_generator.manual_seed(seed)
        model = built(small, kind, attention if attention in CPU_KERNELS else None)
        perturb(model, seed)
        model.train()
    return model


def with_dropout(config: PreTrainedConfig, rate: float) -> PreTrainedConfig:
    """The same config with this rate for all dropout and jitter, and without layer drop.

    Integer fields stay integers, since some configs insist.
    """
    fields = fields_of(config)
    for node in nested(fields):
        node.update({name: type(value)(rate) for name, value in node.items() if _is_rate(name, value)})
        node.update({name: type(value)(0) for name, value in node.items() if name.endswith("layerdrop")})
    return config_of(config, fields)


def dropout_rates(config: PreTrainedConfig) -> list[float]:
    """All dropout and jitter rates of a config."""
    return [float(value) for node in nested(fields_of(config)) for name, value in node.items() if _is_rate(name, value)]


def _is_rate(name: str, value: object) -> bool:
    return DROPOUT.fullmatch(name) is not None and isinstance(value, int | float) and not isinstance(value, bool)


def built(config: PreTrainedConfig, kind: type[PreTrainedModel] | None, attention: str | None) -> PreTrainedModel:
    """A fresh float32 model of a config, initialised by its own code. `config` is not changed."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if attention is not None:
        options["attn_implementation"] = attention
    copied = copy.deepcopy(config)
    made: PreTrainedModel
    with quiet():
        made = (
            auto_class(copied).from_config(copied, **options) if kind is None else kind._from_config(copied, **options)
        )
    return made


def perturb(model: nn.Module, seed: int) -> None:
    """Add seeded noise to every parameter, and to saved buffers that hold small numbers.

    So no error hides behind scales of one and biases of zero, or behind weights too small to reach a cap.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = max(1, parameter.shape[-1]) ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and bool((buffer.abs() <= 10).all()):
                buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.05)


# Trying ------------------------------------------------------------------------------------------------------------


def _shrunk(
    config: PreTrainedConfig, whole: Fields, kind: type[PreTrainedModel] | None, effort: str
) -> PreTrainedConfig:
    small, skeleton = _with_few_layers(config, narrowed(whole, effort), kind, effort)
    numel = sum(parameter.numel() for parameter in skeleton.parameters())
    if numel > MAX_PARAMETERS:
        raise ModelError(f"its twin would still have {numel:,} parameters")
    _try(built(small, kind, None))
    return small


def _with_few_layers(
    config: PreTrainedConfig, narrow: Fields, kind: type[PreTrainedModel] | None, effort: str
) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """The config of these fields with as few layers as have every kind, and its model without values. Raises
    `ModelError` if a kind is lost."""
    skeleton = _skeleton(wide := config_of(config, narrow), kind)
    stacks = _stacks(skeleton, config)
    kinds_of = partial(_kinds_of_all, stacks=stacks, counted=effort != "twice")
    kinds = [kinds_of(skeleton, wide, stack) for stack in stacks]
    for stack, every in zip(stacks, kinds, strict=True):
        node = _at(narrow, stack.path)
        keeps_all = effort == "patches" and "patch_size" in node
        chosen = list(range(stack.depth)) if keeps_all else layers_to_keep(every, effort)
        node.update(with_layers(node, stack.depth, chosen))
        for of, name in _tapping(narrow, stack.path):
            places = [chosen.index(layer) for layer in items(of[name])]
            of[name] = places if isinstance(of[name], list) else places[0]
    small = config_of(config, narrow)
    skeleton = _skeleton(small, kind)
    for stack, every in zip(stacks, kinds, strict=True):
        if set(every) - set(kinds_of(skeleton, small, stack)):
            raise ModelError("its twin lacks a kind of layer")
    return small, skeleton


def _try(model: PreTrainedModel) -> None:
    """Run the model on a few ordinary tokens; raise whatever it raises, or `ModelError` if logits are not finite."""
    ids = torch.tensor(ordinary_tokens(model.config)[:TRIAL_TOKENS]).unsqueeze(0)
    with torch.no_grad(), quiet():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("its twin's logits are not finite")


def ordinary_tokens(config: PreTrainedConfig) -> list[int]:
    """Token ids without a special meaning (padding, image placeholders)."""
    special: set[int] = set()
    for node in nested(fields_of(config)):
        for name, value in node.items():
            if TOKEN.fullmatch(name):
                special |= {item for item in items(value) if isinstance(item, int)}
    text = fields_of(config.get_text_config())
    vocabulary = min(text[name] for name in ("vocab_size", "unpadded_vocab_size") if text.get(name))
    return [token for token in range(vocabulary) if token not in special]


def _skeleton(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> PreTrainedModel:
    with torch.device("meta"):
        return built(config, kind, None)


def fields_of(config: PreTrainedConfig) -> Fields:
    """The fields of a config, nested ones too, without those about its checkpoint."""
    fields: Fields = _string_keyed(config.to_dict())
    nodes = [fields]
    for node in nodes:
        for name in CHECKPOINT:
            node.pop(name, None)
        if not node.get("output_attentions"):
            node.pop("output_attentions", None)  # some nested configs write it but cannot read it
        nodes += [value for value in node.values() if isinstance(value, dict)]
    return fields


def _string_keyed(value: Any) -> Any:
    """A copy of nested fields with layer numbers that are keys turned into strings."""
    if isinstance(value, dict):
        return {str(key): _string_keyed(inner) for key, inner in value.items()}
    return [_string_keyed(item) for item in value] if isinstance(value, list) else value


def config_of(config: PreTrainedConfig, fields: Fields) -> PreTrainedConfig:
    with quiet():
        parsed: PreTrainedConfig = type(config).from_dict(copy.deepcopy(fields))
    parsed._experts_implementation = config._experts_implementation
    return parsed


# Depth -------------------------------------------------------------------------------------------------------------

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers that one config, at `path` in the whole, describes: their number, module lists, and per-layer
    fields."""

    path: Path
    depth: int
    modules: tuple[str, ...]
    fields: tuple[str, ...]


def _stacks(model: PreTrainedModel, config: PreTrainedConfig, path: Path = ()) -> list[_Stack]:
    """All stacks of layers, including those of nested configs."""
    stacks: list[_Stack] = []
    plain = fields_of(config)
    lists = outermost_module_lists(model)
    counts = [value for name, value in plain.items() if LAYER_COUNT.fullmatch(name) and isinstance(value, int)]
    for depth in (getattr(config, "decoder_layers", None), getattr(config, "num_hidden_layers", None), *counts):
        modules = tuple(name for name in lists if len(lists[name]) == depth)
        if depth and modules:
            fields = tuple(name for name, value in plain.items() if _entry_each(name, value, depth))
            stacks.append(_Stack(path, depth, modules, fields))
            break
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            stacks += _stacks(model, inner, (*path, name))
    return stacks


def _at(fields: Fields, path: Path) -> Fields:
    for name in path:
        fields = fields[name]
    return fields


def _kinds_of_all(
    model: PreTrainedModel, config: PreTrainedConfig, stack: _Stack, *, stacks: Sequence[_Stack], counted: bool
) -> list[object]:
    """What distinguishes each layer of a stack, together with the layers of all stacks that have the same module lists,
    since nothing tells whose list is whose."""
    alike = [other for other in stacks if other.modules == stack.modules]
    return list(zip(*(kinds_of_layers(model, config, other, counted=counted) for other in alike), strict=False))


def kinds_of_layers(
    model: PreTrainedModel, config: PreTrainedConfig, stack: _Stack, *, counted: bool = True
) -> list[object]:
    """For each layer of a stack, what distinguishes it: classes, parameters, switches, and its entries in the
    config. counted: whether it matters how many like modules a list in it has."""
    node = _at(fields_of(config), stack.path)
    modules = [list(model.get_submodule(name).children()) for name in stack.modules]
    depth = min((len(layers) for layers in modules), default=1)
    entries = [value for name in stack.fields if len(value := node[name]) == depth]
    taps = [value for name, value in node.items() if TAPPED.fullmatch(name) and isinstance(value, list)]
    taps += [items(of[name]) for of, name in _tapping(fields_of(config), stack.path)]
    entries += [[value.index(i) if i in value else None for i in range(depth)] for value in taps]
    return [
        (
            tuple(_looks(layers[i], counted) for layers in modules),
            json.dumps([entry[i] for entry in entries], default=str),
        )
        for i in range(depth)
    ]


def _tapping(fields: Fields, path: Path) -> list[tuple[Fields, str]]:
    """Fields that name layers of the tower at `path`, by their numbers from its first: `vision_feature_layer`."""
    named = path[-1].removesuffix("_config") if path else ""
    return [
        (node, name)
        for node in nested(fields)
        for name, value in node.items()
        if named and name in (f"{named}_feature_layer", f"{named}_feature_layers")
        if all(isinstance(layer, int) and layer >= 0 for layer in items(value))
    ]


def _looks(layer: nn.Module, counted: bool) -> tuple[object, ...]:
    """What distinguishes a layer besides its number: classes, shapes, switches, strings, and what is absent. counted:
    see `kinds_of_layers`."""
    looks: list[object] = []
    for name, module in layer.named_modules():
        switches = sorted(
            (key, value if isinstance(value, bool | str) else value is None)
            for key, value in vars(module).items()
            if not key.startswith("_")
        )
        shapes = [(key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False)]
        place = name if counted else re.sub(r"\d+", "", name)
        looks.append((place, type(module).__qualname__, repr(switches), repr(shapes)))
    return tuple(looks if counted else dict.fromkeys(looks))


def layers_to_keep(kinds: Sequence[object], effort: str) -> list[int]:
    """Numbers of layers that cover every kind: the first of each, or two, or all up to the last of these; at least
    two."""
    if effort == "twice":
        return [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2][:MAX_PREFIX]
    firsts = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    if effort == "prefix":
        firsts = list(range(firsts[-1] + 1))
    others = [index for index in range(len(kinds)) if index not in firsts]
    return sorted([*firsts, *others[: max(0, 2 - len(firsts))]])[:MAX_PREFIX]


LAYER_COUNT = re.compile(r"(num_)?(hidden_|decoder_|encoder_|n_)?layers?|num_blocks|num_(de|en)coder_layers|depth")
LEADING = re.compile(r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index")
TRAILING = re.compile(r"num_kv_shared_layers")
LAST = re.compile(r"moe_layer_end_index")
LAYER_NUMBERS = re.compile(r"\w*layer\w*|\w*_(idx|id)s|\w*_(indexes|indices)")
TAPPED = re.compile(r"\w*_(indexes|indices)")
"""Layers whose outputs something behind a tower takes, one by one; all of them remain."""


def with_layers(node: Fields, depth: int, chosen: Sequence[int]) -> Fields:
    """The fields that change if only the `chosen` of `depth` layers remain."""
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
    """Whether a field is a list with one entry per layer."""
    return isinstance(value, list) and len(value) == depth and not _are_layers(name, value, depth)


def _are_layers(name: str, value: list[Any], depth: int) -> bool:
    """Whether a list holds layer numbers in order."""
    numbers = all(isinstance(item, int) and 0 <= item < depth for item in value)
    return LAYER_NUMBERS.fullmatch(name) is not None and numbers and value == sorted(set(value))


def _shorter(name: str, value: list[Any], depth: int, chosen: Sequence[int]) -> list[Any] | None:
    """A list about layers, reduced to the chosen ones; `None` for a list about something else."""
    if value and _are_layers(name, value, depth):
        return [place for place, layer in enumerate(chosen) if layer in value]
    if len(value) == depth:
        return [value[layer] for layer in chosen]
    if value and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) for item in value):
        spread = [kind for pattern, times in value for _ in range(times) for kind in pattern]  # [[pattern, times], ...]
        return [[[spread[layer] for layer in chosen], 1]] if len(spread) == depth else None
    return None


# Small sizes ----------------------------------------------------------------------------------------------------------
#
# Small sizes for config fields, by name and value, never by model type. Every rule preserves what code relies on:
# width = heads x head size where that holds, sums of head sizes, equality of numbers, key heads dividing query heads,
# expert groups, special tokens inside the vocabulary. A field that no rule knows is not changed.


VOCAB = 96
POSITIONS = 128
SHORT, LONG = 8, 14
"""Tokens of sequences that are compared: a rotary embedding that depends on the length changes between them."""


EFFORTS = ("chosen", "prefix", "windows", "patches", "twice")
"""Which layers remain, tried in this order: one of each kind; the first ones up to the last kind; one of each kind, and
windows as they are; one of each kind, but towers keep theirs and get small patches, as widths may follow from both; two
of each kind, since some share what lies in them, and have lists of one part for each that shares."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "embed_dim", "hidden_dim", "dim")
MAIN_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("attention_heads", "decoder_attention_heads", "encoder_attention_heads"),
)
MERGES = (4, 9, 16)
"""Neighbouring patches that one projection joins, so that its input is as many times as wide as a tower."""
DIVISORS = (64, 32, 16, 8, 4, 2)
TOKEN = re.compile(r"(\w+_)?token_(id|index)s?|(\w+_)?tokens_ids?")
VOCABULARY = re.compile(r"\w*vocab_size\w*|\w+_vocab")
HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?(_per_layer)?|((de|en)coder_)?attention_heads|num_query_groups")
INDEXER_HEADS = re.compile(r"index_n_heads")
"""The number of an indexer's heads; the sum of their scores, clipped at zero, chooses tokens. It is not reduced: with
few heads many tokens score exactly zero, and which of them is chosen would depend on the rest of the row."""
HEAD_SIZE = re.compile(r"(\w+_)?head_?(dim|size)|kv_channels|dim_head|(\w+_)?d_head|rotary_dim|d_rel")
SIZE = re.compile(
    r"(\w+_)?hidden_size\w*|n_embd|d_model|(\w+_)?intermediate_size\w*|n_inner|dff|dim_ff|d_inner|mamba_d_ssm|lru_width"
    r"|(\w+_)?(embed|embd|embedding|ffn|proj|projection|mid|in|out|output|hidden)_dim|(\w+_)?(in|out)put_size|embedding_size|emb_dim|dim"
    r"|(\w+_)?(rank|lowrank)|feed_forward_size|(\w+_)?ffn_size"
)
ROLES = (
    ("positions", re.compile(r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length"
                             r"|model_max_length|max_\w+_positions")),
    ("window", re.compile(r"sliding_window(_size)?|(attention_|keep_)?window_size|local_attention|attention_chunk_size"
                          r"|local_attention_window_len|index_topk|(\w+_)?attn_chunk_length|rel_extent"
                          r"|log_scaling_n_floor|floor_scale")),
    ("chunk", re.compile(r"(?!max_|audio|acoustic)(\w+_)?(chunk|block)_size|index_topk_blocks|compress_rates")),
    ("state", re.compile(r"(\w+_)?(d_state|state_size)")),
    ("experts", re.compile(r"(\w+_)?num_(local_)?experts|n_routed_experts|zero_expert_num|(\w+_)?num_moe_experts")),
    ("chosen experts", re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|(router_)?top_?k(_experts)?")),
    ("expert groups", re.compile(r"n_group|num_expert_groups?")),
    ("chosen groups", re.compile(r"topk_group")),
    ("state groups", re.compile(r"(mamba_)?n_?groups|o_groups")),
    ("channels", re.compile(r"base_channels")),
    ("filters", re.compile(r"(num|n)_filters")),
)  # fmt: skip
SMALL = {"window": 4, "chunk": 4, "state": 8, "experts": 8, "chosen experts": 2, "expert groups": 2, "state groups": 2}
SMALL |= {"channels": 32, "filters": 4, "patch": 2}
"""Target sizes; smaller fields are not changed. Channels are normalized in 32 groups; filters double in every layer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Old and new sizes of one config, as pairs."""

    hidden: tuple[int, int]
    heads: dict[int, int]
    divisor: int
    """Divides head sizes."""
    vocabulary: int
    positions: tuple[int, int]
    shared: dict[int, int] = field(default_factory=dict)
    """Old and new hidden sizes of all configs of the model, by which its parts refer to one another's widths."""

    def width(self, value: int) -> int:
        """The width of another part, or of some of its patches side by side; else scaled with the hidden size: exactly
        if that is a multiple of 8, which some kernels need, or roughly."""
        old, new = self.hidden
        for times in (1, *MERGES) if value != old else ():
            if value % times == 0 and value // times != old and value // times in self.shared:
                return times * self.shared[value // times]
        if value < 8 or old == new:
            return value
        exact, rest = divmod(value * new, old)
        return exact if not rest and exact % 8 == 0 else min(value, max(8, round(exact / 8) * 8))


def narrowed(node: Fields, effort: str, outer: Sizes | None = None) -> Fields:
    """A config's fields with small sizes. outer: sizes of the enclosing config, for one without widths of its own."""
    known, sizes = outer or _sizes_of_all(node), _sizes(node)
    sizes = replace(sizes, shared=known.shared) if sizes else known
    small = {name: _narrow(name, value, effort, sizes) for name, value in node.items()}
    small.update(_rejoined(node, small, sizes))
    if "index_topk" in node:
        small.update({name: value for name, value in node.items() if INDEXER_HEADS.fullmatch(name)})
    if outer is None:
        _move_all_tokens(small)
    return small


def _sizes_of_all(node: Fields) -> Sizes:
    """The sizes of the config with the largest vocabulary, and the hidden sizes of all."""
    known = [sizes for inner in nested(node) if (sizes := _sizes(inner))]
    known.sort(key=lambda sizes: -sizes.vocabulary)
    if not known:
        return Sizes((1, 1), {}, 1, 0, (1, POSITIONS))
    shared = {old: new for old, new in (sizes.hidden for sizes in reversed(known))}
    return replace(known[0], shared=shared)


def nested(node: Fields) -> list[Fields]:
    """The fields and all fields nested in them, the outer ones first."""
    nodes = [node]
    for inner in nodes:
        nodes += [value for value in inner.values() if isinstance(value, dict)]
    return nodes


def _narrow(name: str, value: Any, effort: str, sizes: Sizes) -> Any:
    if isinstance(value, dict) and name == "compress_rates":
        return {key: _narrow_number(name, item, effort, sizes) for key, item in value.items()}
    if isinstance(value, dict):
        return narrowed(value, effort, sizes)
    if name == "mrope_section" and isinstance(value, list):
        return _sections(value, sizes.divisor)
    if name in ("short_factor", "long_factor") and isinstance(value, list):
        return value[:: sizes.divisor][: len(value) // sizes.divisor]
    if isinstance(value, list):
        return [_narrow_number(name, item, effort, sizes) for item in value]
    return _narrow_number(name, value, effort, sizes)


def _sections(values: list[int], divisor: int) -> list[int]:
    """Parts of a rotary embedding, as many and with the same sum as if it were cut whole. Equal ones stay equal, since
    heights and widths of images take turns: what is left goes to the part that has a size of its own."""
    small = [value // divisor for value in values]
    small[values.index(min(values, key=values.count))] += sum(values) // divisor - sum(small)
    return small


def _narrow_number(name: str, value: Any, effort: str, sizes: Sizes) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        return value
    if VOCABULARY.fullmatch(name):
        return _vocabulary(value, sizes.vocabulary)
    if HEADS.fullmatch(name):
        return sizes.heads.get(value, value)
    if HEAD_SIZE.fullmatch(name):
        return value // sizes.divisor if value > 8 and value % sizes.divisor == 0 else value
    if name == "patch_size" and effort == "patches":
        return min(value, SMALL["patch"])
    if name == "query_pre_attn_scalar":  # a head size, used only to scale scores
        return max(1, value // sizes.divisor)
    if SIZE.fullmatch(name):
        return sizes.width(value)
    role = next((role for role, names in ROLES if names.fullmatch(name)), None)
    if role is None or (role == "window" and effort == "windows"):
        return value
    if role == "positions":
        old, new = sizes.positions
        return min(value, max(4, value * new // old if name.startswith("original_") else new))
    if role == "chosen groups":
        return 1
    return min(value, SMALL[role])


def _vocabulary(value: int, main: int) -> int:
    """A size below the main vocabulary stays below it (an unpadded one); a tiny one (token types) is kept."""
    return min(value, VOCAB if value >= main else VOCAB - 6)


def _sizes(node: Fields) -> Sizes | None:
    """Old and new sizes, with the largest divisor of head sizes that fits; `None` for fields without widths."""
    hidden = next((node[name] for name in HIDDEN if isinstance(node.get(name), int)), None)
    heads = next((node[name] for name in MAIN_HEADS if isinstance(node.get(name), int)), None)
    if hidden is None or (heads is None and "vocab_size" not in node):
        return None
    vocabulary = node.get("vocab_size") or 0
    positions = _positions(node)
    heads = heads or 1
    whole = hidden // heads if hidden % heads == 0 else 0
    size = node["head_dim"] if isinstance(node.get("head_dim"), int) else whole  # 0: neither given nor an integer
    every = {n for n in (*_numbers(node, HEAD_SIZE), size) if n > 8}  # 0 is unknown, others are small already
    counts = _tiny_counts(sorted({n for n in _numbers(node, HEADS) if n > 1}), heads)
    share = min([1.0, *_numbers(node, re.compile(r"partial_rotary_factor|rot\w*_pct"))])
    # what `dynamic` multiplies is raised to the power of d / (d - 2)
    least_rotary = 4 if any("dynamic" in str(rope["rope_type"]) for rope in ropes_of(node)) else 2
    section = min(_numbers(node, re.compile("mrope_section")), default=DIVISORS[0])  # none becomes empty
    for divisor in (divisor for divisor in DIVISORS if divisor <= section):
        small = size // divisor if size else 16
        new = _new_hidden(hidden, heads, size, counts.get(heads, heads), small)
        fits = all(v % divisor == 0 and v // divisor % 2 == 0 and v // divisor >= 4 for v in every)
        rotary = int(small * share)
        if fits and small >= 8 and rotary >= least_rotary and rotary % 2 == 0 and new >= min(32, hidden):
            return Sizes((hidden, new), counts, divisor, vocabulary, positions)
    return Sizes((hidden, hidden), {}, 1, vocabulary, positions)


def _positions(node: Fields) -> tuple[int, int]:
    """Old and new numbers of positions. Rotary embeddings that change with the length do so at about `SHORT`."""
    old = next((v for k, v in node.items() if ROLES[0][1].fullmatch(k) and isinstance(v, int)), 0) or 1
    new = POSITIONS
    for rope in ropes_of(node):
        if "dynamic" in str(rope["rope_type"]):
            new = max(SHORT, ceil(LONG / max(1.0, rope.get("factor") or 1.0)))
        elif "long_factor" in rope:
            original = rope.get("original_max_position_embeddings") or node.get("original_max_position_embeddings")
            new = min(POSITIONS, max(LONG, SHORT * old // (original or old)))
    return old, new


def _tiny_counts(counts: list[int], main: int) -> dict[int, int]:
    """Old -> new head counts: equal ones stay equal, and powers of two in the same order stay divisible."""
    start = 1 if counts and counts[0] < main else 2
    small = {count: 2 ** (start + rank) for rank, count in enumerate(counts)}
    return small if all(new <= old for old, new in small.items()) else {}


def _new_hidden(hidden: int, heads: int, size: int, new_heads: int, new_size: int) -> int:
    """The hidden size that relates to `new_heads` x `new_size` as `hidden` does to `heads` x `size` (0: unknown)."""
    if not size:
        return new_heads * new_size
    common = gcd(hidden, heads * size)
    times, parts = hidden // common, heads * size // common
    if max(times, parts) <= 8 and new_heads * new_size * times % parts == 0:
        return new_heads * new_size * times // parts
    return new_heads * new_size * 3 // 2


def _rejoined(node: Fields, small: Fields, sizes: Sizes) -> Fields:
    """Restore relations of parts with heads of their own: head sizes, if heads x size is a multiple of the hidden
    size, and a part's width, if it is heads x size."""
    old, new = sizes.hidden
    fixed: Fields = {}
    if node.get("topk_group") == node.get("n_group") and "n_group" in node:
        fixed["topk_group"] = small["n_group"]  # no group was left out, and none is
    widths = [name for name in node if SIZE.fullmatch(name)]
    for heads in filter(HEADS.fullmatch, node):
        part = re.sub(r"(num|n)_|_?heads?\b", "", heads).strip("_")
        for size in filter(HEAD_SIZE.fullmatch, node):
            same = re.sub(r"_?d?_?head_?(dim|size)?\b", "", size).strip("_") == part
            both = (node[heads], node[size], small[heads])
            if same and part and all(isinstance(number, int) and number > 0 for number in both):
                times, rest = divmod(node[heads] * node[size], old)
                if times and not rest and times * new % small[heads] == 0:
                    fixed[size] = times * new // small[heads]
                whole = small[heads] * fixed.get(size, small[size])
                fixed.update({w: whole for w in widths if w.startswith(part) and node[w] == node[heads] * node[size]})
    return fixed


def _move_all_tokens(small: Fields) -> None:
    """Move special tokens beyond a vocabulary to its end. A part without a vocabulary names tokens of the largest."""
    nodes = nested(small)
    speaking = sorted((node for node in nodes if node.get("vocab_size")), key=lambda node: -node["vocab_size"])
    for place, node in enumerate(speaking):
        silent = [] if place else [inner for inner in nodes if not inner.get("vocab_size")]
        _move_tokens([node, *silent], node["vocab_size"])


def _move_tokens(nodes: Sequence[Fields], vocabulary: int) -> None:
    """Move special tokens beyond the vocabulary to its end, each to an id of its own."""
    fields = [(node, name) for node in nodes for name in node if TOKEN.fullmatch(name)]
    tokens = {v for node, name in fields for v in items(node[name]) if isinstance(v, int)}
    free = [token for token in reversed(range(vocabulary)) if token not in tokens]
    places = dict(zip(sorted(token for token in tokens if token >= vocabulary), free, strict=False))
    for node, name in fields:
        value = node[name]
        node[name] = [places.get(v, v) for v in value] if isinstance(value, list) else places.get(value, value)


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers(node: Fields, names: re.Pattern[str]) -> list[Any]:
    """All numbers in fields of such names, in lists and in nested fields without widths of their own."""
    numbers: list[Any] = []
    for name, value in node.items():
        if isinstance(value, dict):
            numbers += [] if any(isinstance(value.get(width), int) for width in HIDDEN) else _numbers(value, names)
        elif names.fullmatch(name):
            numbers += [item for item in items(value) if isinstance(item, int | float) and not isinstance(item, bool)]
    return numbers
