"""Memory and attention of a layer besides its weights, as frozen values; measured by `model.profile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from megatrain.spec.validate_fields import Bounds

Amount = Annotated[float, Bounds(0, 1e15)]
"""Bytes or operations."""
Count = Annotated[int, Bounds(1, 1 << 40)]
Share = Annotated[float, Bounds(0, 1)]


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes as a function of the size of a micro-batch."""

    fixed: Amount = 0.0
    """Constant: gradients of weights, say."""
    per_token: Amount = 0.0
    per_pair: Amount = 0.0
    """Per token and position of its sequence: masks, stored scores."""
    per_chunk_token: Amount = 0.0
    """Per token of a chunk, if token-wise parts run in chunks."""
    with_kernel: bool = False
    """For a peak: whether a kernel that allocates memory (attention, loss) runs there."""
    per_value: Amount = 0.0
    """Per value of images (`Work.values_per_token`)."""

    def nbytes(self, tokens: int, length: int, chunk: int = 0, values: float = 0.0) -> float:
        """Bytes for `tokens` tokens in sequences of `length`."""
        text = self.fixed + tokens * (self.per_token + self.per_pair * length) + self.per_chunk_token * chunk
        return text + self.per_value * values


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest live bytes besides weights, input and the output's gradient: the maximum of a few fits. Empty if
    not measured."""

    device: tuple[Growth, ...] = ()
    host: tuple[Growth, ...] = ()
    """On a CPU, including float32 results of bfloat16 products."""

    def on(self, host: bool) -> Sequence[Growth]:
        return self.host if host else self.device

    def nbytes(
        self, host: bool, tokens: int, length: int, chunk: int = 0, kernel: int = 0, values: float = 0.0
    ) -> float:
        """kernel: bytes that the kernel allocates."""
        fits = self.on(host)
        return max(
            (each.nbytes(tokens, length, chunk, values) + kernel * each.with_kernel for each in fits), default=0.0
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """Bytes that stored op outputs take and save (`chosen`, `attention` of `spec.Keep`)."""

    chosen_nbytes: Amount = 0.0
    """Bytes per token that `chosen` keeps besides the input; 0 if unknown."""
    shared_nbytes: Amount = 0.0
    """The part of them that the rebuilt graph holds, too."""
    attention_nbytes: Amount = 0.0
    """Bytes per token that `attention` keeps besides the input; the rebuilt graph holds all of it."""
    chosen_offloaded: Peak = Peak()
    """Peak of forward and backward with the outputs of `chosen` in other memory. May exceed `backward` minus
    `shared_nbytes`, since the graph would free some of them before the peak."""
    attention_offloaded: Peak = Peak()
    """The same for the outputs of `attention`."""
    chosen_share: Share = 0.0
    """Share of the forward's product FLOPs that `chosen` does not repeat."""
    spared_share: Share = 0.0
    """Share that neither it nor `attention` repeats, since no gradient needs the results."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Memory and attention of a unit besides its weights, in the compute dtype of the measurement."""

    attention_flops: Amount = 0.0
    """Attention's forward FLOPs per token and attended position: usually 4 x heads x head size."""
    window: Count | None = None
    """Attention window in positions; `None` means all earlier ones."""
    forward: Peak = Peak()
    """Peak of a forward without gradients, including the output; for the prologue, including layers' arguments."""
    backward: Peak = Peak()
    """Peak of a forward with gradients and its backward; for the epilogue, of a chunk of the loss. A prologue has it
    only for rows with images."""
    backward_in_chunks: Peak = Peak()
    """The same with token-wise parts in chunks."""
    graph: Growth = Growth()
    """What autograd keeps for the backward, besides the layer's input."""
    graph_in_chunks: Growth | None = None
    """The same with token-wise parts in chunks; `None` if it has none."""
    block: Count = 1
    """The layer pads sequences to multiples of this many tokens."""
    chunk_numel: Annotated[int, Bounds(0, 1 << 50)] = 0
    """Parameters of the largest token-wise part."""
    outputs: Outputs = Outputs()
    balance: Peak = Peak()
    """For the epilogue: peak of a router auxiliary loss for a micro-batch, forward and backward."""
    arguments: Growth = Growth()
    """For the prologue: arguments of all layers besides the hidden state that rows share."""
    row_arguments: Growth = Growth()
    """The same per row."""
    value_flops: Amount = 0.0
    """For a prologue with images: FLOPs of its products per value, forward."""
    value_flops_backward: Amount = 0.0
    """The same, forward and backward."""
    others: tuple[tuple[str, LayerProfile], ...] = ()
    """Where it differs: for other rows, `padded`, `packed`, `masked` (attention is told by a mask), `several` and
    `images`; and `cpu`, on which attention may have no fused kernel."""

    def __hash__(self) -> int:
        """Hashes only short fields; equality compares all. A search calls it hundreds of thousands of times."""
        return hash((self.attention_flops, self.window, self.graph, self.block, self.chunk_numel))

    def of(self, *rows: str) -> LayerProfile:
        """The profile for such rows: the first that differs, or this one."""
        known = dict(self.others)
        return next((known[name] for name in rows if name in known), self)

    def stored(self, keep: str, tokens: int) -> int:
        """Bytes that `chosen` or `attention` keeps of this many tokens, besides the input."""
        return int(tokens * (self.outputs.chosen_nbytes if keep == "chosen" else self.outputs.attention_nbytes))

    def kept(self, rows: int, length: int, chunk: int = 0) -> int:
        """Bytes of a kept graph over `rows` sequences of `length` tokens; `chunk` as in `Numerics.mlp_chunk_tokens`."""
        left = self.graph_in_chunks if 0 < chunk < rows * length else None
        length = self.padded(length)
        return int((left or self.graph).nbytes(rows * length, length))

    def padded(self, length: int) -> int:
        """Length of a sequence after the layer's padding."""
        return -(-length // self.block) * self.block

    def attended(self, length: int) -> float:
        """Average number of positions that a token of a sequence of `length` attends to, including itself
        (causal)."""
        if self.window is None or self.window >= length:
            return (length + 1) / 2
        full = self.window * (self.window + 1) / 2 + (length - self.window) * self.window
        return full / length


NOTHING_KNOWN = LayerProfile()
