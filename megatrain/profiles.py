"""What a layer takes beside its weights, as frozen values: what it attends to, keeps, and holds at its widest moments.

How it is found is in `model.profile`, `model.moments` and `model.tokenwise`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that exist at one moment of a layer's backward, beside its weights, its input and that of its output."""

    fixed: float = 0.0
    """Whatever the number of tokens: gradients of weights."""
    per_token: float = 0.0
    per_token_by_length: float = 0.0
    """Per token and position of the sequence."""
    per_chunk_token: float = 0.0
    """Per token of a chunk, where token-wise parts run in chunks."""
    attends: bool = False
    """Whether attention's kernel is at work, with memory of its own."""

    def nbytes(self, tokens: int, length: int, chunk: int) -> float:
        """Of sequences of `length` tokens, `tokens` together."""
        by_tokens = tokens * (self.per_token + self.per_token_by_length * length)
        return self.fixed + by_tokens + self.per_chunk_token * min(chunk, tokens)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What a layer takes beside its weights, in the compute dtype that it was profiled in."""

    attention_flops: float = 0.0
    """Forward operations of attention per token and attended position: 4 x heads x head size, usually."""
    window: int | None = None
    """Positions that a token attends to at most; `None` is all that came before."""
    kept_nbytes: float = 0.0
    """Bytes per token that autograd keeps of the layer's graph, its input included, weights not."""
    kept_nbytes_by_length: float = 0.0
    """And per token and position of the sequence, where the attention kernel keeps its scores."""
    chunked_nbytes: float = 0.0
    """Of `kept_nbytes`, what is not kept where token-wise parts run in chunks; 0 where it has none."""
    chunk_nbytes: float = 0.0
    """Bytes per token that autograd keeps of a chunk at work, of the part that keeps most."""
    chunk_numel: int = 0
    """Parameters of the largest token-wise part."""

    moments: tuple[Moment, ...] = ()
    """The widest ones of its backward on an accelerator, of which one is the widest at any length; empty: not known."""
    host_moments: tuple[Moment, ...] = ()
    """On a cpu, with the float32 results of products in bfloat16."""
    chunked_moments: tuple[Moment, ...] = ()
    """As `moments`, where token-wise parts run in chunks."""
    host_chunked_moments: tuple[Moment, ...] = ()

    formed_moments: tuple[Moment, ...] = ()
    """Of the epilogue, whose `moments` are of a chunk: when its logits have been formed, their gradient included."""
    balance_moments: tuple[Moment, ...] = ()
    """Of the epilogue: the widest ones of the router auxiliary loss of a micro-batch, forward and backward."""
    host_balance_moments: tuple[Moment, ...] = ()
    sides_nbytes: float = 0.0
    """Bytes per token of what a layer has recorded for that loss, and later of their gradient."""

    arguments_nbytes: float = 0.0
    """Of the prologue: bytes per position of what all layers are called with besides the hidden state."""
    arguments_nbytes_by_length: float = 0.0
    """And per position and position, of masks."""
    arguments_row_nbytes: float = 0.0
    """And beside those, per row and position, where rows do not share them."""
    arguments_row_nbytes_by_length: float = 0.0
    """And per row, position and position."""

    forward_moments: tuple[Moment, ...] = ()
    """The widest ones of the forward without gradients, its output included; of the prologue, with what it hands on."""
    host_forward_moments: tuple[Moment, ...] = ()

    masked: LayerProfile | None = None
    """Where attention is told by a mask: a window that the sequence fills, or padded or packed rows. Of the prologue,
    of the window alone."""
    several: LayerProfile | None = None
    """Where several rows take more, row by row, than one: products that copy what they share. Of a layer."""
    padded: LayerProfile | None = None
    """Of the prologue: with padded rows."""
    packed: LayerProfile | None = None
    """Of the prologue: with packed rows."""

    chosen_nbytes: float = 0.0
    """Bytes per token of what `chosen` keeps beside the input; 0 where nothing is known of it."""
    shared_nbytes: float = 0.0
    """Of those, what a graph that grows from them holds too."""
    attention_nbytes: float = 0.0
    """Bytes per token of what `attention` keeps beside the input; a graph holds all of it."""
    chosen_share: float = 0.0
    """Share of the operations of the forward's products that `chosen` does not do again."""
    spared_share: float = 0.0
    """Share of them that neither it nor `attention` does again, since no gradient needs their results."""

    def of_rows(self, rows: str, *, windowed: bool) -> LayerProfile:
        """The profile for such rows, which reach a window or not."""
        found = {"padded": self.padded, "packed": self.packed}.get(rows)
        masked = self.masked if windowed or rows != "whole" else None
        return found or masked or self

    def stored(self, keep: str, tokens: int) -> int:
        """Bytes that `chosen` or `attention` keeps of so many tokens, beside the input."""
        return int(tokens * (self.chosen_nbytes if keep == "chosen" else self.attention_nbytes))

    def kept(self, rows: int, length: int, chunk: int = 0) -> int:
        """Bytes of a kept graph over `rows` sequences of `length` tokens; `chunk` as in `Policy.mlp_chunk_tokens`."""
        left = self.kept_nbytes - (self.chunked_nbytes if 0 < chunk < rows * length else 0.0)
        return int(rows * length * (left + self.kept_nbytes_by_length * length))

    def attended(self, length: int) -> float:
        """Positions that a token of a sequence of `length` attends to on average, itself included (causal)."""
        if self.window is None or self.window >= length:
            return (length + 1) / 2
        full = self.window * (self.window + 1) / 2 + (length - self.window) * self.window
        return full / length


NOTHING_KNOWN = LayerProfile()
