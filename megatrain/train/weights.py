"""`Weights` reads and sets single parameters of an engine, and fills all of them from a model's files."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatrain.model import Progress, Source
from megatrain.train.one_call_at_a_time import TakesTurns, one_at_a_time
from megatrain.train.parts import Parts
from megatrain.train.restore import refuse_other_shapes, refuse_unknown


class Weights(TakesTurns):
    """The weights of an engine, by parameter name. It is `Engine.weights`; pending updates are applied first."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._turn = parts, parts.turn

    @one_at_a_time
    def __getitem__(self, name: str) -> Tensor:
        """A copy of one parameter's float32 master, in its shape. Raises `ModelError` for an unknown name."""
        refuse_unknown(name, self._parts.structure, "weights")
        self._parts.flush()
        return self._parts.store.master(name)

    @one_at_a_time
    def view(self, name: str) -> Tensor | None:
        """A view of one parameter in host memory, in its shape: float32, or in bf16 the bfloat16 weight that streams.
        Training changes it, and writing to it changes the weight.

        `None` if the policy places it elsewhere. The view is valid until another policy is adopted. Raises `ModelError`
        for an unknown name.
        """
        refuse_unknown(name, self._parts.structure, "weights.view")
        self._parts.flush()
        return self._parts.store.view(name)

    @one_at_a_time
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Set some parameters, name -> value in the parameter's shape, keeping optimizer and counters.

        Raises `ModelError`, before any is set, for an unknown name or a wrong shape.
        """
        refuse_other_shapes(weights, self._parts.structure)
        self._parts.settle()
        self._parts.saver.wait()
        self._parts.causes.weights_replaced()
        for name in self._parts.store.names():  # unit by unit
            if name in weights:
                self._parts.store.write_master(name, weights[name])

    @one_at_a_time
    def flush(self) -> None:
        """Apply pending updates, if any. Everything that reads the weights does so first."""
        self._parts.flush()

    @one_at_a_time
    def fill(self, source: Source, progress: Progress | None = None) -> None:
        """Set every parameter from a source, keeping optimizer and counters. progress: called with (done, total)."""
        self._parts.fill(source, progress)

    @property
    def rounded(self) -> list[str]:
        """Frozen parameters whose source values were not bfloat16: in bf16 they are held, and written, rounded to the
        bfloat16 values used in computing. Empty in fp32."""
        return sorted(self._parts.store.rounded)
