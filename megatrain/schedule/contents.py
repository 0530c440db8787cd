"""Contents: frozen values that say what is in a range of bytes, as ops expect and leave it.

Contents are equal if they mean the same bytes: a gradient after two terms differs from one after three. `str` is
the short form in printed schedules: `w3` (the weights of unit 3), `g3~2` (its gradient after two terms). `version`
distinguishes a state before this step's update (`old`) and after it (`new`) from one that is not updated.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.spec import Part, SavedOutputs


@dataclass(frozen=True, slots=True)
class Weights:
    unit: int
    version: str = ""

    def __str__(self) -> str:
        return _versioned(f"w{self.unit}", self.version)


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """A rank's part of a shard of a unit's weights."""

    unit: int

    def __str__(self) -> str:
        return f"w{self.unit}/"


@dataclass(frozen=True, slots=True)
class LowBits:
    """The low 16 bits of float32 masters, which bfloat16 weights lack."""

    unit: int
    version: str = ""

    def __str__(self) -> str:
        return _versioned(f"l{self.unit}", self.version)


@dataclass(frozen=True, slots=True)
class Moments:
    """What the optimizer keeps of trained elements: AdamW's m and v."""

    unit: int
    version: str = ""

    def __str__(self) -> str:
        return _versioned(f"m{self.unit}", self.version)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a unit's weights."""

    unit: int
    version: str = ""
    terms: int | None = None
    """Number of terms summed so far; `None` once complete."""
    changing: bool = False
    """The running call may have added to it, so only that call may read it."""

    @property
    def is_whole(self) -> bool:
        """Whether it is a complete gradient of this step."""
        return self.terms is None and not self.changing and not self.version

    def __str__(self) -> str:
        terms = "" if self.terms is None else f"~{self.terms}"
        return f"{_versioned(f'g{self.unit}', self.version)}{terms}{'+' if self.changing else ''}"


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A rank's part of a shard of a unit's gradient, summed over all ranks."""

    unit: int
    shard: int

    def __str__(self) -> str:
        return f"g{self.unit}/{self.shard}"


@dataclass(frozen=True, slots=True)
class RankGradient:
    """One rank's shard of a unit's gradient, before the sum over all ranks."""

    unit: int
    shard: int

    def __str__(self) -> str:
        return f"g{self.unit}:{self.shard}"


@dataclass(frozen=True, slots=True)
class Direction:
    """In which direction a group of whole matrices will be moved (`passes.directions`)."""

    unit: int
    group: int
    orthogonal: bool = False
    """Whether the matrices have been made orthogonal."""

    def __str__(self) -> str:
        return f"o{self.unit}.{self.group}{'' if self.orthogonal else '~'}"


@dataclass(frozen=True, slots=True)
class Norm:
    """The sum of squares of a unit's gradient."""

    unit: int

    def __str__(self) -> str:
        return f"n{self.unit}"


@dataclass(frozen=True, slots=True)
class Hidden:
    """The input of a unit, for one micro-batch."""

    unit: int
    micro: int

    def __str__(self) -> str:
        return f"h{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class HiddenGradient:
    """The gradient of a unit's input, for one micro-batch."""

    unit: int
    micro: int

    def __str__(self) -> str:
        return f"d{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class TapGradient:
    """What the prologue adds to the gradient of the input of an encoder's layer, for one micro-batch."""

    unit: int
    micro: int

    def __str__(self) -> str:
        return f"d{self.unit}.{self.micro}+"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of layers besides the hidden state, for one micro-batch."""

    micro: int
    of: int = 0
    """The unit that makes them: the prologue, or the first of an encoder."""

    def __str__(self) -> str:
        return f"a{self.of}.{self.micro}" if self.of else f"a{self.micro}"


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The autograd graph of a layer, for one micro-batch."""

    unit: int
    micro: int

    def __str__(self) -> str:
        return f"k{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Saved:
    """Saved outputs of a layer's products or attention, for its backward, for one micro-batch."""

    unit: int
    micro: int
    keep: SavedOutputs
    """Which outputs."""
    offloaded: bool = False
    """Whether they are packed into a slot rather than separate tensors."""

    def __str__(self) -> str:
        return f"c{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Side:
    """A side value (`ModelSpec.sides`, by number), for one micro-batch."""

    number: int
    micro: int

    def __str__(self) -> str:
        return f"s{self.number}.{self.micro}"


@dataclass(frozen=True, slots=True)
class SideGradient:
    """The gradient of a side value, for one micro-batch, after the terms of its users down to unit `after`."""

    number: int
    micro: int
    after: int

    def __str__(self) -> str:
        return f"t{self.number}.{self.micro}~{self.after}"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that nobody reads again."""

    name: str

    def __str__(self) -> str:
        return self.name


USED = Scratch("used")
"""Memory that an op has freed: it must not be read, and its pages may be returned to the system."""

SENT, RETURNED = Scratch("parts sent"), Scratch("matrices returned")
"""What an ALLTOALL leaves in memory that it uses: of parts of directions on their way to the ranks that make matrices
orthogonal, or of these on their way back."""

State = Weights | LowBits | Moments | Gradient
CONTENT_OF: dict[Part, type[State]] = {
    Part.WEIGHTS: Weights,
    Part.LOW_BITS: LowBits,
    Part.MOMENTS: Moments,
    Part.GRADIENTS: Gradient,
}
PART_OF: dict[type, Part] = {content: part for part, content in CONTENT_OF.items()}
Content = (
    State
    | OwnWeights
    | OwnGradient
    | RankGradient
    | Direction
    | Norm
    | Hidden
    | HiddenGradient
    | TapGradient
    | Arguments
    | LayerGraph
    | Saved
    | Side
    | SideGradient
    | Scratch
)


def _versioned(text: str, version: str) -> str:
    return f"{text}.{version}" if version else text
