"""What lies in a range of bytes: the contents that ops expect and leave, as frozen values.

Two contents are equal where the same bytes are meant: a gradient after two terms is another content than after three.
`str` gives the short form of a printed schedule, such as `w3` (the weights of unit 3) or `g3~2` (its gradient after two
terms). `version` tells a state before this step's update (`old`) and behind it (`new`) from one that is not updated.
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
    """A rank's part of a shard of a unit's weights, which the other ranks' parts make whole."""

    unit: int

    def __str__(self) -> str:
        return f"w{self.unit}/"


@dataclass(frozen=True, slots=True)
class LowBits:
    """The 16 bits that bfloat16 weights lack of their float32 masters."""

    unit: int
    version: str = ""

    def __str__(self) -> str:
        return _versioned(f"l{self.unit}", self.version)


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's m and v."""

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
    """How many have been summed so far; `None` once all have."""
    changing: bool = False
    """The call under way may have added to it: nothing but that call may read it."""

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
    """What one rank has of a shard of a unit's gradient, before the sum over all ranks."""

    unit: int
    shard: int

    def __str__(self) -> str:
        return f"g{self.unit}:{self.shard}"


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
class Arguments:
    """What layers are called with besides the hidden state, for one micro-batch."""

    micro: int

    def __str__(self) -> str:
        return f"a{self.micro}"


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The autograd graph of a layer, for one micro-batch."""

    unit: int
    micro: int

    def __str__(self) -> str:
        return f"k{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Saved:
    """Outputs of a layer's products or attention, saved for its backward, for one micro-batch."""

    unit: int
    micro: int
    keep: SavedOutputs
    """Which of them."""
    offloaded: bool = False
    """Whether they pass through a slot, one behind the other, and not as tensors of their own."""

    def __str__(self) -> str:
        return f"c{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Side:
    """What a layer has recorded for the loss (router logits), for one micro-batch, or the gradient of that."""

    unit: int
    micro: int
    is_gradient: bool = False

    def __str__(self) -> str:
        return f"{'t' if self.is_gradient else 's'}{self.unit}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Scratch:
    """What nobody reads again."""

    name: str

    def __str__(self) -> str:
        return self.name


USED = Scratch("used")
"""Memory that an op has given up: nobody may read it, and its pages may go back to the system."""

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
    | Norm
    | Hidden
    | HiddenGradient
    | Arguments
    | LayerGraph
    | Saved
    | Side
    | Scratch
)


def _versioned(text: str, version: str) -> str:
    return f"{text}.{version}" if version else text
