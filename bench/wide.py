"""Repeats a narrow model over its width: a model of any size that computes the same function.

Each channel, each head and each channel of an MLP of the narrow model is there `times` times in the wide one, and a
matrix that sums over repeated inputs is divided by that number. Losses and logits are then the narrow model's, and so
are gradients up to a factor (`Repeated.gradient_factor`), to rounding. So what plain autograd computes in a second for
the narrow model says what every single number of a wide one must be, at sizes that nothing else can check.

How copies lie beside each other, and which tensors sum, follows from the model's code, which is not read: candidates
are tried with the stock code (`find_recipe`), and where none gives the same logits and gradients, the model is refused.
Models with a factor that depends on the width, such as Gemma's of embeddings, are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError, typed_line
from megatrain.model.skeleton import blueprint, on_the_cpu, where_of
from megatrain.model.tiny import (
    HEADS,
    HIDDEN,
    MAIN_HEADS,
    TRIAL_TOKENS,
    built,
    config_of,
    fields_of,
    items,
    nested,
    ordinary_tokens,
    twin_from,
    with_dropout,
)
from megatrain.model.weight_sources import Masters, MastersByRange, Progress, Report
from megatrain.train.parity import group_of

FEED_FORWARD = re.compile(
    r"(\w+_)?intermediate_size\w*|n_inner|(\w+_)?(ffn|mlp|feed_forward)_(dim|size|hidden_size)|d_ff|dff|dim_ff"
)
"""Names of the widths of MLPs."""

TRIAL_TIMES = 2
SAME = 1e-4
"""Largest difference of logits to their largest, and of a gradient to its norm, that is rounding in float32."""
FLOOR = 1e-2
"""Least norm of a gradient to compare with, relative to the largest of all."""
MOST_SUMS = 3
"""Kinds of parameters for which it is tried whether they sum."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """How a parameter of the wide model consists of the narrow one's, of `shape`.

    times, blocks: for each dimension, how often it is repeated, and of how many elements the copies lie in a row.
    factor: of each copy's value.
    """

    shape: tuple[int, ...]
    times: tuple[int, ...]
    blocks: tuple[int, ...]
    factor: float

    @property
    def wide_shape(self) -> tuple[int, ...]:
        return tuple(size * times for size, times in zip(self.shape, self.times, strict=True))

    @property
    def copies(self) -> int:
        """Of each element."""
        return prod(self.times)

    @property
    def gradient_factor(self) -> float:
        """The gradient of each copy over that of the narrow parameter: all copies move the loss alike, and together as
        the narrow parameter does."""
        return 1 / (self.copies * self.factor)

    def values(self, narrow: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the wide parameter, counted through all dimensions, in the dtype of `narrow`."""
        width = self.wide_shape[-1]
        first, last = start // width, -(-stop // width)
        table = narrow.reshape(-1, self.shape[-1])[self._rows(first, last)] * self.factor
        times, block = self.times[-1], self.blocks[-1]
        rows = table.view(last - first, -1, 1, block).expand(-1, -1, times, -1).reshape(-1)
        return rows[start - first * width : stop - first * width]

    def rows(self, narrow: Tensor, numbers: Tensor) -> Tensor:
        """Whole rows of the wide parameter, by their numbers through all dimensions but the last."""
        width = self.wide_shape[-1]
        return torch.stack([self.values(narrow, row * width, (row + 1) * width) for row in numbers.tolist()])

    def farthest(self, wide: Tensor) -> Tensor:
        """For each element of the narrow parameter the copy that differs most from the mean of all copies, so that
        an error of one does not vanish among the others. Where a copy is not finite, neither is the result."""
        split = [part for size, times, block in zip(self.shape, self.times, self.blocks, strict=True)
                 for part in (size // block, times, block)]  # fmt: skip
        copies = wide.reshape(split)
        over = tuple(range(1, copies.dim(), 3))
        mean, low, high = copies.mean(over), copies.amin(over), copies.amax(over)
        farthest = torch.where(high - mean > mean - low, high, low)
        return torch.where(mean.isfinite(), farthest, mean).reshape(self.shape)

    def _rows(self, first: int, last: int) -> Tensor:
        """The narrow rows of rows [first, last) of the wide parameter."""
        rest, rows, stride = torch.arange(first, last), torch.zeros(last - first, dtype=torch.int64), 1
        for size, times, block in reversed([*zip(self.shape, self.times, self.blocks, strict=True)][:-1]):
            place = rest % (size * times)
            rows += stride * (place // (block * times) * block + place % block)
            rest, stride = rest // (size * times), stride * size
        return rows


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to repeat a model over its width so that it computes the same function.

    joined: the kinds of joined projections whose copies are apart for each of the projections: gates and ups of MLPs,
    or queries, keys and values of heads. All other dimensions are there as a whole, over and over. sums: groups of
    parameters (`group_of`) that sum over their only repeated dimension, of those where the class of the module does
    not say. final_norm: a module whose parameters are divided, since a head that is tied to the embedding cannot be."""

    joined: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    final_norm: str = ""


class WideModel:
    """A narrow model repeated over its width, as a source for an engine: no more of it than a range is ever in memory.

    Raises `ModelError` for a model that is not the same function then.
    """

    def __init__(self, narrow: PreTrainedModel, times: int, recipe: Recipe | None = None) -> None:
        """recipe: by default it is searched."""
        self.narrow = narrow
        self.recipe = recipe or find_recipe(narrow.config)
        self.config = with_width(narrow.config, Fraction(times))
        self.config.architectures = narrow.config.architectures
        self.model: PreTrainedModel = blueprint(self.config, attention=str(narrow.config._attn_implementation))
        _copy_buffers(narrow, self.model)
        self.parameters: Mapping[str, Repeated] = _repeated(narrow, self.model, self.recipe)

    def values(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a parameter, counted through all dimensions."""
        return self.parameters[name].values(self.narrow.get_parameter(name).detach(), start, stop)

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        report = Report(progress, sum(parameter.numel() for parameter in self.model.parameters()))
        for name in (name for unit in units for name in unit):
            parameter = self.parameters[name]
            numel = prod(parameter.wide_shape)
            if isinstance(masters, MastersByRange):
                masters.write_ranges(name, lambda start, stop, name=name: self.values(name, start, stop))  # type: ignore[misc]
            else:
                masters.write_master(name, self.values(name, 0, numel).view(parameter.wide_shape))
            report.add(numel)
        report.end()


def with_width(config: PreTrainedConfig, times: Fraction) -> PreTrainedConfig:
    """The config with a hidden size, MLPs and numbers of heads so many times as large.

    Sizes of heads, vocabulary and ranks stay, as do the number of experts and a number of key heads that is one. Raises
    `ModelError` for a size that is no integer then.
    """
    fields = fields_of(config)

    def scaled(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [scaled(name, item) for item in value]
        is_head, is_number = HEADS.fullmatch(name), isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not (name in HIDDEN or is_head or FEED_FORWARD.fullmatch(name)):
            return value
        if is_head and value == 1 and times < 1:
            return value
        if (new := value * times).denominator > 1:
            what = f"its {name} of {value:,} cannot be divided by {times.denominator:,}"
            raise ModelError(what, where=f"model {type(config).__name__}", fix="repeat it fewer times")
        return int(new)

    for node in nested(fields):
        if "vocab_size" in node and any(isinstance(node.get(name), int) for name in HIDDEN):
            node.update({name: scaled(name, value) for name, value in node.items()})
    return config_of(config, fields)


# How a model is repeated ----------------------------------------------------------------------------------------------


def find_recipe(config: PreTrainedConfig) -> Recipe:
    """How a narrow model is repeated so that it stays the same function: found with the stock code, in float32, by
    comparing one of random weights with its repetition. Raises `ModelError` if nothing that is tried does it."""
    config = with_dropout(config, 0.0)
    narrow = twin_from(config, 0, str(config._attn_implementation)).eval()
    try:
        with torch.random.fork_rng(devices=[]), on_the_cpu():
            kernel = str(narrow.config._attn_implementation)
            wide = built(with_width(config, Fraction(TRIAL_TIMES)), None, kernel).eval()
    except Exception as error:  # whatever foreign code raises for sizes that do not fit together
        raise _refused(config, f"cannot be built at another width ({typed_line(error)})") from error
    _copy_buffers(narrow, wide)
    ids = torch.tensor(ordinary_tokens(config)[:TRIAL_TOKENS]).unsqueeze(0)
    expected, gradients = _answers(narrow, ids)
    least = math.inf
    for recipe in _candidates(narrow, wide):
        repeated = _repeated(narrow, wide, recipe)
        for name, parameter in repeated.items():
            values = parameter.values(narrow.get_parameter(name).detach(), 0, prod(parameter.wide_shape))
            wide.get_parameter(name).data.copy_(values.view(parameter.wide_shape))
        logits, of_copies = _answers(wide, ids)
        floor = FLOOR * max(float(gradient.norm()) for gradient in gradients.values())
        errors = [float((logits - expected).abs().max() / expected.abs().max())]
        for name, gradient in gradients.items():
            made = repeated[name].farthest(of_copies[name]) / repeated[name].gradient_factor
            errors.append(float((made - gradient).norm()) / max(float(gradient.norm()), floor))
        if all(error <= SAME for error in errors):
            return recipe
        least = min(least, max(errors))
    what = f"is another function when its width is repeated: logits or gradients differ by {least:.0e}"
    raise _refused(config, what)


def _refused(config: PreTrainedConfig, what: str) -> ModelError:
    return ModelError(what, where=where_of(config), fix="take another kind of model")


def _copy_buffers(narrow: PreTrainedModel, wide: PreTrainedModel) -> None:
    """Give the wide model those of the narrow one's buffers that have the same shape, such as biases of routers."""
    for name, buffer in wide.named_buffers():
        if buffer.shape == (value := narrow.get_buffer(name)).shape:
            buffer.copy_(value)


def _answers(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a row of tokens, and gradients of its loss by the names of parameters."""
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach().float(), named


def _candidates(narrow: PreTrainedModel, wide: PreTrainedModel) -> Iterator[Recipe]:
    modules = dict(wide.named_modules())
    times = _times(narrow, wide)
    unclear = sorted({group_of(name) for name, counts in times.items() if _sums(modules, name, counts) is None})
    unclear = unclear[:MOST_SUMS]
    head = wide.get_output_embeddings()
    vectors = [name for name, parameter in wide.named_parameters() if parameter.dim() == 1]
    norms = [""]
    if head is not None and head.weight is wide.get_input_embeddings().weight:
        norms = [*(name.rpartition(".")[0] for name in vectors[-1:]), ""]
    for joined, norm in product(((), ("MLPs",), ("heads",), ("MLPs", "heads")), norms):
        for sums in product((True, False), repeat=len(unclear)):
            groups = frozenset(group for group, does in zip(unclear, sums, strict=True) if does)
            yield Recipe(frozenset(joined), groups, norm)


def _repeated(narrow: PreTrainedModel, wide: PreTrainedModel, recipe: Recipe) -> dict[str, Repeated]:
    """Every parameter of the wide model. Raises `ModelError` if one is no repetition of the narrow model's."""
    modules, parameters = dict(wide.named_modules()), dict[str, Repeated]()
    joined = _joined_parts(narrow.config, recipe.joined)
    for name, times in _times(narrow, wide).items():
        sums = _sums(modules, name, times)
        of_final_norm = name.rpartition(".")[0] == recipe.final_norm
        is_divided = of_final_norm or (group_of(name) in recipe.sums if sums is None else sums)
        shape = tuple(narrow.get_parameter(name).shape)
        factor = 1 / max(times) if is_divided else 1.0
        parameters[name] = Repeated(shape, times, tuple(joined.get(size, size) for size in shape), factor)
    return parameters


def _times(narrow: PreTrainedModel, wide: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name of a parameter -> how often each of its dimensions is repeated in the wide model."""
    shapes, wides = ({name: each.shape for name, each in model.named_parameters()} for model in (narrow, wide))
    if other := sorted(shapes.keys() ^ wides.keys()):
        raise _refused(narrow.config, f"has other parameters when its width is repeated: {other[0]}")
    counts = dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        pairs = [divmod(size, before) for size, before in zip(wides[name], shape, strict=True)]
        if any(rest for _, rest in pairs) or len({count for count, _ in pairs} - {1}) > 1:
            what = f"its parameter {name} of shape {list(shape)} becomes {list(wides[name])} when its width is repeated"
            raise _refused(narrow.config, what)
        counts[name] = tuple(count for count, _ in pairs)
    return counts


def _sums(modules: Mapping[str, nn.Module], name: str, times: tuple[int, ...]) -> bool | None:
    """Whether a sum over a repeated dimension of a parameter is taken; `None` if neither its shape nor its module says
    so."""
    module = modules[name.rpartition(".")[0]]
    repeated = [dimension for dimension, count in enumerate(times) if count > 1]
    if len(times) < 2 or not repeated or isinstance(module, nn.Embedding):
        return False
    if isinstance(module, nn.Linear):
        return repeated[-1] == len(times) - 1
    return True if len(repeated) > 1 else None


def _joined_parts(config: PreTrainedConfig, kinds: frozenset[str]) -> dict[int, int]:
    """Sizes of dimensions of joined projections -> of a part. Where another dimension, which has to stay whole, has one
    of these sizes by chance, the model is found to be another function."""
    fields = config.get_text_config().to_dict()
    hidden = next(fields[name] for name in HIDDEN if isinstance(fields.get(name), int))
    heads = next((fields[name] for name in MAIN_HEADS if isinstance(fields.get(name), int)), 1)
    width = heads * (fields.get("head_dim") or hidden // heads)
    mlps = [size for name, value in fields.items() if FEED_FORWARD.fullmatch(name) for size in items(value)]
    joined = {2 * size: size for size in mlps if isinstance(size, int)} if "MLPs" in kinds else {}
    return joined | ({3 * width: width} if "heads" in kinds else {})
