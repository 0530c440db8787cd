"""Evaluates during training: the loss of each validation source, and metrics of the user's own.

The loss is measured in rounds of as many micro-batches as a step has, so that it takes no more memory than one; several
ranks share each round. A metric is a function that the user names (`train.metrics: my_metrics:exact_match`); it gets an
`Evaluation`, and gives a number, or several by name.

    def exact_match(evaluation):
        losses = [evaluation.engine.evaluate([batch]) for batches in evaluation.sources.values() for batch in batches]
        return {"worst": max(losses)}

Left out: what is told of it (`train.events`), and tasks of lm_eval (`run.lm_eval_tasks`).
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatrain.data.loader import Batch
from megatrain.data.tokenizer import Tokenizer
from megatrain.engine.chunked_loss import divisor_of
from megatrain.errors import ConfigError, typed_line
from megatrain.losses import LossFn
from megatrain.run.ranks import own_of
from megatrain.train.engine import Engine
from megatrain.train.events import Evaluated, Scored


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a metric is given, on each rank; it must ask the same of the engine on all of them."""

    step: int
    """Steps done."""
    engine: Engine
    """Has `evaluate`, `log_probs`, `logits`, `generate`."""
    tokenizer: Tokenizer
    sources: Mapping[str, Iterable[Batch]]
    """The micro-batches of each validation source, by name; they can be iterated repeatedly."""


Metric = Callable[[Evaluation], float | Mapping[str, float]]


def evaluated(
    step: int, engine: Engine, sources: Mapping[str, Iterable[Batch]], loss_fn: LossFn | None, together: int
) -> Evaluated:
    """The mean loss of each source and of all together, weighted by target tokens or the loss function's divisor.

    together: micro-batches per step of all ranks.
    """
    sums: dict[str, _Sums] = {}
    for name, batches in sources.items():
        sums[name] = _Sums()
        for round_ in _rounds(batches, together):
            weight = sum(divisor_of(loss_fn, batch) for batch in round_)
            if weight:
                measured = engine.measure(own_of(engine.world, round_), loss_fn)
                sums[name].add(weight, {"loss": measured.loss, **measured.metrics})
    whole = _Sums()
    for each in sums.values():
        whole.add(each.weight, each.means())
    means = whole.means()
    loss = means.pop("loss", math.nan)
    by_source = {name: each.means().get("loss", math.nan) for name, each in sums.items()}
    return Evaluated(step, loss, means, by_source if len(by_source) > 1 else {})


def _rounds(batches: Iterable[Batch], together: int) -> Iterator[list[Batch]]:
    rest = iter(batches)
    while round_ := list(islice(rest, together)):
        yield round_


class _Sums:
    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: dict[str, float] = {}

    def add(self, weight: float, means: Mapping[str, float]) -> None:
        self.weight += weight
        for name, mean in means.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * mean

    def means(self) -> dict[str, float]:
        return {name: number / self.weight for name, number in self._sums.items()}


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Import the user's metric functions, from installed modules or modules in the working directory.

    Raises `ConfigError` for one that cannot be imported.
    """
    here = str(Path.cwd())
    if names and here not in sys.path:
        sys.path.insert(0, here)
    return {name: _loaded(name) for name in names}


def _loaded(name: str) -> Metric:
    module, colon, function = name.partition(":")
    if not colon or not module or not function.isidentifier():
        raise ConfigError(f"{name!r} is not module:function", where="train.metrics", fix="write my_metrics:accuracy")
    try:
        metric_function = getattr(importlib.import_module(module), function)
    except Exception as error:  # user code may raise anything
        what = f"{name} cannot be imported ({typed_line(error)})"
        fix = "name a function of a module in the working directory, or of an installed one"
        raise ConfigError(what, where="train.metrics", fix=fix) from error
    if not callable(metric_function):
        raise ConfigError(f"{name} is not a function", where="train.metrics", fix="name a function")
    metric: Metric = metric_function
    return metric


def scored(metrics: Mapping[str, Metric], evaluation: Evaluation) -> Scored:
    """Call the metrics. Raises `ConfigError` for one that returns no numbers, and whatever a metric raises."""
    scores: dict[str, float] = {}
    for name, metric in metrics.items():
        score: Any = metric(evaluation)
        numbers = score if isinstance(score, Mapping) else {name.partition(":")[2]: score}
        for key, value in numbers.items():
            try:
                scores[str(key)] = float(value)
            except (TypeError, ValueError) as error:
                what = f"{name} returned {type(value).__name__} as {str(key)!r}"
                raise ConfigError(what, where="train.metrics", fix="return a number, or numbers by name") from error
    evaluation.engine.world.exchange("scores", None)  # one rank may work for all here, as long as that takes
    return Scored(evaluation.step, scores)
