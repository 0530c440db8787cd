"""Merges an adapter into its base, unit by unit, as a source of weights of the merged model.

The arithmetic is `peft`'s, in float32. One thing differs: weights that the base ties stay one only if the adapter has
trained them as one. `peft` adds to the one tensor what the adapter has learnt for either of them, which is another
model than the one that was trained.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.adapters import UNMERGED, AdaptedSource, merge_layer
from megatrain.model.architecture import head_of
from megatrain.model.pretrained import first_names, untie
from megatrain.model.weight_sources import Masters, Progress, quiet


class MergedSource:
    """The base of an adapter with the adapter merged into it. Every unit that is filled holds whole modules."""

    def __init__(self, adapted: AdaptedSource) -> None:
        """Raises `ModelError` for a weight that the base ties, if no configuration could say that it is untied."""
        self._adapted = adapted
        self._first = first_names(adapted.base.model)
        self._layers, self._wholes = adapted.layers, adapted.wholes
        self.model: Any = copy.deepcopy(adapted.base.model)
        models: tuple[Any, ...] = (self.model, adapted.model)
        rows, adapted_rows = (len(model.get_input_embeddings().weight) for model in models)
        if rows != adapted_rows:
            with quiet():
                self.model.resize_token_embeddings(adapted_rows, mean_resizing=False)
        for name, first in self._first.items():
            if name != first and self._differs(first, name):
                self._untie(first, name)

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        for unit in units:
            held = WeightsInMemory()
            self._adapted.base.fill(held, [[*dict.fromkeys(self._first[name] for name in unit)]])
            values = {
                name: self._adapted.changed(self._first[name], held.master(self._first[name])).clone() for name in unit
            }
            held.values.clear()
            for path, module in self._layers:
                if any(f"{path}.{key}" in values for key, _ in module.get_base_layer().named_parameters()):
                    merge_layer(path, module, values)
            for name in unit:
                masters.write_master(name, self._wholes.get(name, values[name]))

    def _differs(self, first: str, name: str) -> bool:
        """Whether the adapter gives one weight of the base two values under its two names."""
        one, other = (self._wholes.get(weight) for weight in (first, name))
        if one is not None or other is not None:
            return one is None or other is None or not torch.equal(one, other)
        over = dict(self._layers)
        modules = [over.get(weight.rpartition(".")[0]) for weight in (first, name)]
        if None in modules:
            return modules != [None, None]
        if any(getattr(module, "tied_adapter", None) in modules for module in modules):
            return False
        return not getattr(self._adapted.config, "ensure_weight_tying", False)

    def _untie(self, first: str, name: str) -> None:
        ends = (self.model.get_input_embeddings(), head_of(self.model))
        text: Any = self.model.config.get_text_config()
        parameter = self.model.get_parameter(name)
        if not text.tie_word_embeddings or any(getattr(end, "weight", None) is not parameter for end in ends):
            what = f"{first} and {name} are tied, but the adapter has trained them apart"
            raise ModelError(what, where="adapter", fix=UNMERGED)
        untie(self.model, name)
        self.model.config.tie_word_embeddings = text.tie_word_embeddings = False


class WeightsInMemory:
    """Holds master weights in memory, by name."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def master(self, name: str) -> Tensor:
        return self.values[name]

    def write_master(self, name: str, value: Tensor) -> None:
        self.values[name] = value.detach().to(torch.float32, copy=True)
