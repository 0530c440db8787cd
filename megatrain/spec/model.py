"""`ModelSpec`: a causal language model as units that stream: a prologue, its decoder layers, an epilogue."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from megatrain.errors import PlanError
from megatrain.spec.layer_profile import NOTHING_KNOWN, LayerProfile


class FileBytes(NamedTuple):
    """Bytes [place, place + nbytes) of a file."""

    file: str
    place: int
    nbytes: int


UnitKind = Literal["prologue", "layer", "epilogue"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, by its full Hugging Face name, stored once however many names it is tied to."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    """Share of the elements that one token uses: below 1 for experts."""
    trainable: bool = True
    """A frozen parameter streams like any other, has no gradient and is never updated."""
    held: int = 0
    """Parameters behind it, in order of use, that a forward of its layer comes to before it reads this one for the last
    time: 1 for a matrix that is read together with its bias; -1 where it may come back to it at any time."""
    file_backed: bool = False
    """It is frozen, and the model's own files hold its bytes as they are held here."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What streams as one. `borrows` names parameters of the prologue that this unit also uses (tied weights).

    Trainable parameters come first, in whatever order they are given, so that gradients and moments are arrays over a
    prefix of the unit and frozen parameters take no place in them. Those that lie in the model's files come last, so
    that what must be held without them is a prefix too.
    """

    name: str
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    borrows: tuple[str, ...] = ()
    profile: LayerProfile = NOTHING_KNOWN
    looks_up: bool = False
    """Of a prologue: its gradient depends on ids alone, so its backward pass needs no weights."""
    ranks: int = 1
    """How many ranks share its state, each owning an equal part of every shard (`layout`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(sorted(self.params, key=_home)))

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def with_in_files(self, names: Collection[str]) -> UnitSpec:
        """The same unit, of which these frozen parameters lie in the model's files, and no others do."""
        params = tuple(replace(param, file_backed=not param.trainable and param.name in names) for param in self.params)
        if [*map(_home, params)] != sorted(map(_home, params)):  # out of the order of use
            params = tuple(replace(param, held=-1) for param in params)
        return self if params == self.params else replace(self, params=params)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is updated."""
        return bool(self.params) and self.params[0].trainable


def _home(param: ParamSpec) -> int:
    return 0 if param.trainable else 1 + param.file_backed


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal language model as a sequence of units: prologue, layers in order of use, epilogue."""

    name: str
    units: tuple[UnitSpec, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None
    attention: str = "sdpa"
    """Attention kernel that the model's own code calls, by its Hugging Face name."""
    base_apart: bool = False
    """Checkpoints hold an adapter alone, and not the base below it."""

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        if len(kinds) < 3 or kinds != ["prologue", *["layer"] * (len(kinds) - 2), "epilogue"]:
            raise PlanError(
                f"units must be a prologue, layers and an epilogue, not {kinds}", where=f"model {self.name}"
            )

    def __hash__(self) -> int:
        """Of what is short; equality looks at all. A search asks for it some hundred times."""
        return hash((self.name, len(self.units), self.hidden_size, self.vocab_size, self.max_positions, self.attention))

    @property
    def names(self) -> list[str]:
        """Of the units."""
        return [unit.name for unit in self.units]

    @property
    def ranks(self) -> int:
        """How many ranks train it together."""
        return self.units[0].ranks

    def over(self, ranks: int) -> ModelSpec:
        """The same model, its state shared by so many ranks."""
        if ranks == self.ranks:
            return self
        return replace(self, units=tuple(replace(unit, ranks=ranks) for unit in self.units))

    def with_in_files(self, names: Collection[str]) -> ModelSpec:
        """The same model, of which these frozen parameters lie in its files as they are held, and no others do."""
        return replace(self, units=tuple(unit.with_in_files(names) for unit in self.units))

    def on_a_cpu(self) -> ModelSpec:
        """The same model with layers as a cpu runs them, whose attention may differ from a device's."""
        profiles = [unit.profile.of("cpu") for unit in self.units]
        if all(profile is unit.profile for profile, unit in zip(profiles, self.units, strict=True)):
            return self
        units = (replace(unit, profile=profile) for unit, profile in zip(self.units, profiles, strict=True))
        return replace(self, units=tuple(units))

    @property
    def layers(self) -> range:
        """Indices of the decoder layers among the units."""
        return range(1, len(self.units) - 1)

    @property
    def epilogue(self) -> int:
        return len(self.units) - 1

    @property
    def tied(self) -> bool:
        """Whether the epilogue uses a parameter of the prologue (a tied head)."""
        return bool(self.units[-1].borrows)

    @property
    def lowest_trained(self) -> int:
        """Index of the first unit that has anything to train: the backward pass ends there."""
        return next((index for index, unit in enumerate(self.units) if unit.trains), len(self.units))

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Parameters that are updated."""
        return sum(param.numel for unit in self.units for param in unit.params if param.trainable)
