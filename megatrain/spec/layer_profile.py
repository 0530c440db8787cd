"""What a layer takes beside its weights, as frozen values: what it attends to, what autograd keeps of it, its peaks.

How it is measured is in `model.profile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes by the size of a micro-batch."""

    fixed: float = 0.0
    """Whatever the number of tokens: gradients of weights."""
    per_token: float = 0.0
    per_pair: float = 0.0
    """Per token and position of its sequence: masks, and scores that a kernel keeps."""
    per_chunk_token: float = 0.0
    """Per token of a chunk, where token-wise parts run in chunks."""
    with_kernel: bool = False
    """Of a peak: whether a kernel with memory of its own is at work there, attention's or the loss's."""

    def nbytes(self, tokens: int, length: int, chunk: int = 0) -> float:
        """Of sequences of `length` tokens, `tokens` together."""
        return self.fixed + tokens * (self.per_token + self.per_pair * length) + self.per_chunk_token * chunk


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest bytes alive at one time, beside weights, input and the gradient of the output: at any size, the
    largest of a few. Empty where nothing was measured."""

    device: tuple[Growth, ...] = ()
    host: tuple[Growth, ...] = ()
    """On a cpu, with the float32 results of products in bfloat16."""

    def on(self, host: bool) -> Sequence[Growth]:
        return self.host if host else self.device

    def nbytes(self, host: bool, tokens: int, length: int, chunk: int = 0, kernel: int = 0) -> float:
        """kernel: what the kernel takes for itself."""
        return max(
            (each.nbytes(tokens, length, chunk) + kernel * each.with_kernel for each in self.on(host)), default=0.0
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """What single ops' outputs take where a layer keeps those (`chosen`, `attention` of `spec.Keep`), and save."""

    chosen_nbytes: float = 0.0
    """Bytes per token of what `chosen` keeps beside the input; 0 where nothing is known of it."""
    shared_nbytes: float = 0.0
    """Of those, what a graph that grows from them holds too."""
    attention_nbytes: float = 0.0
    """Bytes per token of what `attention` keeps beside the input; a graph holds all of it."""
    chosen_offloaded: Peak = Peak()
    """Forward and backward, with what `chosen` keeps somewhere else. It may be more than `backward` less
    `shared_nbytes`, since the graph would let go of some of that before the most is alive."""
    attention_offloaded: Peak = Peak()
    """Likewise, with what `attention` keeps."""
    chosen_share: float = 0.0
    """Share of the operations of the forward's products that `chosen` does not do again."""
    spared_share: float = 0.0
    """Share of them that neither it nor `attention` does again, since no gradient needs their results."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What a unit takes beside its weights, in the compute dtype that it was measured in."""

    attention_flops: float = 0.0
    """Forward operations of attention per token and attended position: 4 x heads x head size, usually."""
    window: int | None = None
    """Positions that a token attends to at most; `None` is all that came before."""
    forward: Peak = Peak()
    """Without gradients, the output included; of the prologue, with what it hands on."""
    backward: Peak = Peak()
    """Of a forward with gradients and its backward; of the epilogue, of a chunk of the loss."""
    backward_in_chunks: Peak = Peak()
    """Where token-wise parts run in chunks."""
    graph: Growth = Growth()
    """What autograd keeps for the backward, beside the layer's input."""
    graph_in_chunks: Growth | None = None
    """Where token-wise parts run in chunks; `None` where it has none."""
    block: int = 1
    """Tokens to whose multiples a layer pads sequences."""
    chunk_numel: int = 0
    """Parameters of the largest token-wise part."""
    outputs: Outputs = Outputs()
    sides_nbytes: float = 0.0
    """Bytes per token of what a layer has recorded for a router's auxiliary loss, and later of their gradient."""
    balance: Peak = Peak()
    """Of the epilogue: that loss of a micro-batch, forward and backward."""
    arguments: Growth = Growth()
    """Of the prologue: what all layers are called with beside the hidden state, shared by the rows."""
    row_arguments: Growth = Growth()
    """And of each row its own."""
    others: tuple[tuple[str, LayerProfile], ...] = ()
    """Where it differs: for other rows, `padded`, `packed`, `masked` (attention is told by a mask) and `several`; and
    `cpu`, on which attention may have no fused kernel."""

    def __hash__(self) -> int:
        """Of what is short; equality looks at all. A search asks for it some hundred thousand times."""
        return hash((self.attention_flops, self.window, self.graph, self.block, self.chunk_numel))

    def of(self, *rows: str) -> LayerProfile:
        """The profile for such rows: the first that differs, or this one."""
        known = dict(self.others)
        return next((known[name] for name in rows if name in known), self)

    def stored(self, keep: str, tokens: int) -> int:
        """Bytes that `chosen` or `attention` keeps of so many tokens, beside the input."""
        return int(tokens * (self.outputs.chosen_nbytes if keep == "chosen" else self.outputs.attention_nbytes))

    def kept(self, rows: int, length: int, chunk: int = 0) -> int:
        """Bytes of a kept graph over `rows` sequences of `length` tokens; `chunk` as in `Numerics.mlp_chunk_tokens`."""
        left = self.graph_in_chunks if 0 < chunk < rows * length else None
        length = self.padded(length)
        return int((left or self.graph).nbytes(rows * length, length))

    def padded(self, length: int) -> int:
        """Tokens of a sequence as the layer has them."""
        return -(-length // self.block) * self.block

    def attended(self, length: int) -> float:
        """Positions that a token of a sequence of `length` attends to on average, itself included (causal)."""
        if self.window is None or self.window >= length:
            return (length + 1) / 2
        full = self.window * (self.window + 1) / 2 + (length - self.window) * self.window
        return full / length


NOTHING_KNOWN = LayerProfile()
