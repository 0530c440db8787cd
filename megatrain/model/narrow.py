"""Small sizes for the fields of a config, by their names and values; no model type is looked at.

Every rule keeps what code relies on: width = heads x head size where that holds, sums of head sizes, equal numbers
equal, heads of keys a divisor of those of queries, expert groups, special tokens inside the vocabulary. A name that no
rule knows stays as it is. Left out: the number of layers, and whether the result works (`model.twin`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd
from typing import Any

Fields = dict[str, Any]
"""A config as `to_dict` gives it, or one of the configs nested in it."""

VOCAB = 96
POSITIONS = 128


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to shrink.

    widths: `tiny`, sizes of our choice; `divided`, all by one number, head counts kept; `kept`. spared: groups of
    fields that stay. depth: layers `chosen`, one of each kind, or a `prefix` that has them all.
    """

    widths: str
    spared: frozenset[str]
    depth: str


SPARABLE = ("window", "chunk", "state", "experts", "positions")
_NONE, _ALL = frozenset[str](), frozenset(SPARABLE)
EFFORTS = (
    Effort("tiny", _NONE, "chosen"),
    Effort("tiny", _NONE, "prefix"),
    *(Effort("tiny", frozenset({group}), "chosen") for group in SPARABLE),
    Effort("tiny", _ALL, "prefix"),
    *(Effort(widths, *how) for widths in ("divided", "kept") for how in ((_NONE, "chosen"), (_ALL, "prefix"))),
)
"""What is tried, in this order."""


HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "dim")
MAIN_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
DIVISORS = (64, 32, 16, 8, 4, 2)
TOKEN = re.compile(r"(\w+_)?token_(id|index)s?|(\w+_)?tokens_ids?")
VOCABULARY = re.compile(r"\w*vocab_size\w*|\w+_vocab")
HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?(_per_layer)?|(de|en)coder_attention_heads|num_query_groups")
HEAD_SIZE = re.compile(r"(\w+_)?head_?(dim|size)|kv_channels|dim_head|(\w+_)?d_head|rotary_dim|d_rel")
SIZE = re.compile(
    r"(\w+_)?hidden_size\w*|n_embd|d_model|(\w+_)?intermediate_size\w*|n_inner|dff|dim_ff|d_inner|mamba_d_ssm|lru_width"
    r"|(\w+_)?(embed|embd|embedding|ffn|proj|mid|in|out)_dim|(\w+_)?(in|out)put_size|embedding_size|emb_dim|dim"
    r"|(\w+_)?(rank|lowrank)|feed_forward_size|(\w+_)?ffn_size"
)
ROLES = (
    ("positions", re.compile(r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length"
                             r"|model_max_length|max_\w+_positions")),
    ("window", re.compile(r"sliding_window(_size)?|(attention_|keep_)?window_size|local_attention|attention_chunk_size"
                          r"|local_attention_window_len|index_topk|(\w+_)?attn_chunk_length|rel_extent"
                          r"|log_scaling_n_floor|floor_scale")),
    ("chunk", re.compile(r"(?!max_|audio)(\w+_)?(chunk|block)_size|index_topk_blocks|compress_rates")),
    ("state", re.compile(r"(\w+_)?(d_state|state_size)")),
    ("experts", re.compile(r"(\w+_)?num_(local_)?experts|n_routed_experts|zero_expert_num|(\w+_)?num_moe_experts")),
    ("chosen experts", re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|(router_)?top_?k(_experts)?")),
    ("expert groups", re.compile(r"n_group|num_expert_groups?")),
    ("chosen groups", re.compile(r"topk_group")),
    ("state groups", re.compile(r"(mamba_)?n_?groups|o_groups")),
)  # fmt: skip
SMALL = {"window": 4, "chunk": 4, "state": 8, "experts": 8, "chosen experts": 2, "expert groups": 2, "state groups": 2}
"""Target sizes; a field that is not larger stays."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What becomes of the sizes of one config. Pairs hold the old and the new."""

    hidden: tuple[int, int]
    heads: dict[int, int]
    divisor: int
    """Of head sizes."""
    vocabulary: int
    positions: int

    def width(self, value: int) -> int:
        """In proportion to the hidden size: exactly where that gives a multiple of 8, which some kernels want, else
        about so."""
        old, new = self.hidden
        if value < 8 or old == new:
            return value
        exact, rest = divmod(value * new, old)
        return exact if not rest and exact % 8 == 0 else min(value, max(8, round(exact / 8) * 8))


def narrowed(node: Fields, effort: Effort, outer: Sizes | None = None) -> Fields:
    """The same fields with small sizes. `outer`: those of the config around it, for one that has none of its own."""
    sizes = _sizes(node, effort) or outer
    if sizes is None:
        sizes = Sizes((1, 1), {}, 1, 0, 0)
    small = {name: _narrow(name, value, effort, sizes) for name, value in node.items()}
    small.update(_rejoined(node, small, sizes))
    if (vocabulary := small.get("vocab_size")) is not None:
        _move_tokens(small, vocabulary)
    return small


def _narrow(name: str, value: Any, effort: Effort, sizes: Sizes) -> Any:
    if isinstance(value, dict) and name == "compress_rates":
        return {key: _narrow_number(name, item, effort, sizes) for key, item in value.items()}
    if isinstance(value, dict):
        return narrowed(value, effort, sizes)
    if name == "mrope_section" and isinstance(value, list):
        ends = [sum(value[: i + 1]) // sizes.divisor for i in range(len(value))]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if name in ("short_factor", "long_factor") and isinstance(value, list):
        return value[:: sizes.divisor][: len(value) // sizes.divisor]
    if isinstance(value, list):
        return [_narrow_number(name, item, effort, sizes) for item in value]
    return _narrow_number(name, value, effort, sizes)


def _narrow_number(name: str, value: Any, effort: Effort, sizes: Sizes) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        return value
    if VOCABULARY.fullmatch(name):
        return _vocabulary(value, sizes.vocabulary)
    if HEADS.fullmatch(name):
        return sizes.heads.get(value, value)
    if HEAD_SIZE.fullmatch(name):
        return value // sizes.divisor if value > 8 and value % sizes.divisor == 0 else value
    if name == "query_pre_attn_scalar":  # a head size, for the scale of scores alone
        return max(1, value // sizes.divisor)
    if SIZE.fullmatch(name):
        return sizes.width(value)
    role = next((role for role, names in ROLES if names.fullmatch(name)), None)
    if role is None or role in effort.spared or (role.endswith(("experts", "groups")) and "experts" in effort.spared):
        return value
    if role == "positions":
        share = value * POSITIONS // max(sizes.positions, 1) if name.startswith("original_") else POSITIONS
        return min(value, max(4, share))
    if role == "chosen groups":
        return 1
    return min(value, SMALL[role])


def _vocabulary(value: int, main: int) -> int:
    """Smaller than the main one stays smaller (an unpadded vocabulary); what is tiny anyway (token types) stays."""
    return min(value, VOCAB if value >= main else VOCAB - 6)


def _sizes(node: Fields, effort: Effort) -> Sizes | None:
    """`None` for fields that have no widths of their own. Of the divisors of head sizes the largest that fits."""
    hidden = next((node[name] for name in HIDDEN if isinstance(node.get(name), int)), None)
    heads = next((node[name] for name in MAIN_HEADS if isinstance(node.get(name), int)), None)
    if hidden is None or (heads is None and "vocab_size" not in node):
        return None
    vocabulary = node.get("vocab_size") or 0
    positions = next((v for k, v in node.items() if ROLES[0][1].fullmatch(k) and isinstance(v, int)), 0)
    divided = effort.widths == "divided"
    heads = heads or 1
    whole = hidden // heads if hidden % heads == 0 else 0
    size = node["head_dim"] if isinstance(node.get("head_dim"), int) else whole  # 0: not stated, and not a whole number
    every = {n for n in (*_numbers(node, HEAD_SIZE), size) if n > 8}  # 0 is unknown, and the others are small enough
    counts = {} if divided else _tiny_counts(sorted({n for n in _numbers(node, HEADS) if n > 1}), heads)
    share = min([1.0, *_numbers(node, re.compile(r"partial_rotary_factor|rot\w*_pct"))])
    for divisor in DIVISORS if effort.widths != "kept" else ():
        small = size // divisor if size else 16
        new = hidden // divisor if divided else _new_hidden(hidden, heads, size, counts.get(heads, heads), small)
        fits = all(v % divisor == 0 and v // divisor % 2 == 0 and v // divisor >= 4 for v in every)
        if divided and hidden % divisor:
            fits = False
        rotary = int(small * share)
        if fits and small >= 8 and rotary >= 2 and rotary % 2 == 0 and new >= min(32, hidden):
            return Sizes((hidden, new), counts, divisor, vocabulary, positions)
    return Sizes((hidden, hidden), {}, 1, vocabulary, positions)


def _tiny_counts(counts: list[int], main: int) -> dict[int, int]:
    """Old to new numbers of heads: equal stay equal, and powers of two in the same order stay divisible."""
    start = 1 if counts and counts[0] < main else 2
    small = {count: 2 ** (start + rank) for rank, count in enumerate(counts)}
    return small if all(new <= old for old, new in small.items()) else {}


def _new_hidden(hidden: int, heads: int, size: int, new_heads: int, new_size: int) -> int:
    """The hidden size that is to `new_heads` x `new_size` what `hidden` is to `heads` x `size` (0: unknown)."""
    if not size:
        return new_heads * new_size
    common = gcd(hidden, heads * size)
    times, parts = hidden // common, heads * size // common
    if max(times, parts) <= 8 and new_heads * new_size * times % parts == 0:
        return new_heads * new_size * times // parts
    return new_heads * new_size * 3 // 2


def _rejoined(node: Fields, small: Fields, sizes: Sizes) -> Fields:
    """Sizes of parts that have heads of their own: head sizes, where heads x size is a multiple of the hidden size, and
    a part's width, where that is heads x size."""
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
            if same and part and all(isinstance(each, int) and each > 0 for each in both):
                times, rest = divmod(node[heads] * node[size], old)
                if times and not rest and times * new % small[heads] == 0:
                    fixed[size] = times * new // small[heads]
                whole = small[heads] * fixed.get(size, small[size])
                fixed.update({w: whole for w in widths if w.startswith(part) and node[w] == node[heads] * node[size]})
    return fixed


def _move_tokens(small: Fields, vocabulary: int) -> None:
    """Give special tokens beyond the vocabulary places at its end, each its own."""
    names = [name for name in small if TOKEN.fullmatch(name)]
    beyond = sorted({v for name in names for v in items(small[name]) if isinstance(v, int) and v >= vocabulary})
    places = {token: vocabulary - 1 - rank for rank, token in enumerate(beyond)}
    for name in names:
        value = small[name]
        small[name] = [places.get(v, v) for v in value] if isinstance(value, list) else places.get(value, value)


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers(node: Fields, names: re.Pattern[str]) -> list[Any]:
    """Every number under such a name, in lists and in nested fields that have no widths of their own."""
    found: list[Any] = []
    for name, value in node.items():
        if isinstance(value, dict):
            found += [] if any(isinstance(value.get(each), int) for each in HIDDEN) else _numbers(value, names)
        elif names.fullmatch(name):
            found += [each for each in items(value) if isinstance(each, int | float) and not isinstance(each, bool)]
    return found
