"""The part of an engine that computes over micro-batches: steps, gradients, measurements, log-probabilities.

A base of `Engine` only to keep both files short, as `Restorable` is: it uses the engine's parts, and adds no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from megatrain.device import Device, timed
from megatrain.engine import KeepLogProbs, LossFn, MicroBatch, StepResult, Streamer, check_inputs, check_micro_batches
from megatrain.errors import ModelError
from megatrain.memory import Disk
from megatrain.model import PortedModel
from megatrain.optim import AdamW
from megatrain.spec import ModelSpec, Work
from megatrain.train.schedules import Schedules
from megatrain.train.sink import GradientCollector, OptimizerSink
from megatrain.train.trace import Trace


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a training step did.

    loss: mean over all target tokens of the step, or what the loss function makes it. grad_norm: global 2-norm of the
    gradient before clipping. tokens: target tokens. stall_seconds: time in which compute waited for copies or updates.
    written_nbytes: what it wrote to the disk tier. metrics: what the loss function reports, means like the loss.
    """

    loss: float
    grad_norm: float
    tokens: int
    stall_seconds: float
    written_nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Stepping:
    """See `Engine`."""

    spec: ModelSpec
    optimizer: AdamW
    _ported: PortedModel
    _device: Device
    _disk: Disk | None
    _schedules: Schedules
    _sink: OptimizerSink
    _streamer: Streamer
    _steps: int
    _trace: Trace | None
    leaves_times: bool
    """Whether each step leaves its `timeline` on every device: on a GPU that takes two events an op."""

    def step(
        self, micro_batches: Sequence[MicroBatch], lr: float | None = None, loss_fn: LossFn | None = None
    ) -> StepOutput:
        """One optimizer step over all micro-batches; the loss is the mean over all their target tokens.

        Each micro-batch holds `input_ids` and `labels`, int64[batch, length] (labels as Hugging Face has them: -100 is
        no target, shifted inside), and whatever else the model's forward takes, such as `attention_mask`. `lr`
        replaces the optimizer's learning rate for this step. `loss_fn` replaces cross-entropy: see
        `megatrain.losses`, where full logits never exist either.

        Raises `BatchError` for an unusable micro-batch and `NonFinite` for a loss or gradient that is not finite; the
        step is then not applied (without clipping, units above a gradient that is not finite may have been: the error
        names them). With clipping, updates are applied during the next step's forward;
        everything that reads the weights applies them first.
        """
        work = self._work(micro_batches, trains=True)
        if self._sink.pending and len(self._sink.pending) < len(self._sink.trained):
            self.flush()  # what an interrupted step has left
        schedule = self._schedules.get("pending step" if self._sink.pending else "step", work)
        self._sink.begin(self.optimizer.lr if lr is None else lr)
        self._device.stalled_seconds()
        before = self._written_nbytes
        wants_times = self.leaves_times or self._trace is not None
        with timed(self._device) if wants_times else nullcontext():
            result = self._streamer.run(schedule, micro_batches, self._sink, self._steps, loss_fn)
        norm = self._sink.finish()
        self._steps += 1
        trace, timeline = self._trace, self._streamer.timeline
        if trace is not None and timeline is not None and trace.add(timeline):
            self._trace = None
        written = self._written_nbytes - before
        return StepOutput(
            result.loss, norm, result.tokens, self._device.stalled_seconds(), written, dict(result.metrics)
        )

    def gradients(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn | None = None) -> dict[str, Tensor]:
        """Parameter name -> float32 gradient of the step's loss, in the parameter's shape. Nothing is updated."""
        work = self._work(micro_batches, trains=True)
        self._settle()
        collector = GradientCollector(self.spec, self._sink.before_update)
        schedule = self._schedules.get("step", work)
        self._streamer.run(schedule, micro_batches, collector, self._steps, loss_fn)
        return collector.gradients

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss over all target tokens of the micro-batches, without dropout. Nothing is updated."""
        return self.measure(micro_batches).loss

    def measure(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn | None = None) -> StepResult:
        """As `evaluate`, for any loss, with the target tokens and what the loss function reports."""
        work = self._work(micro_batches)
        self._settle()
        with self._ported.evaluation_mode():
            return self._streamer.run(self._schedules.get("forward", work), micro_batches, None, 0, loss_fn)

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The log-probability of each label, given the tokens before it: float32[batch, length] per micro-batch, on
        the cpu, at the places of the labels, and 0 where there is no target. Without dropout."""
        keeps = KeepLogProbs()
        self.measure(micro_batches, keeps)
        return keeps.kept

    def logits(self, inputs: MicroBatch) -> Tensor:
        """All logits, float32[batch, length, vocabulary] on the device, for what the model's forward takes.

        These are whole, so this is for few and short rows. Without dropout; nothing is updated.
        """
        check_inputs(self.spec, {"labels": inputs.get("input_ids"), **inputs}, "logits")
        self._settle()
        schedule = self._schedules.get("logits", Work((inputs["input_ids"].numel(),)))
        with self._ported.evaluation_mode():
            return self._streamer.next_logits(schedule, inputs, kept=0)

    def flush(self) -> None:
        """Apply the updates that are pending, if any. Called by everything that reads the weights."""
        self._refuse_closed()
        if self._sink.pending:
            self._streamer.run(self._schedules.get("flush", Work((1,))), [], self._sink)

    def run_ops_in(self, region: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter `region()` around all that is streamed, and nothing else. What it raises there breaks off a step that
        then counts as not begun; with clipping it is done again, bit for bit, whenever that is wanted."""
        self._streamer.region = region

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _written_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.written_nbytes

    def _work(self, micro_batches: Sequence[MicroBatch], *, trains: bool = False) -> Work:
        self._refuse_closed()
        if trains and not self.spec.trained_numel:
            raise ModelError("every parameter is frozen", where=f"model {self.spec.name}", fix="freeze fewer of them")
        return check_micro_batches(self.spec, micro_batches)

    def _settle(self) -> None:
        raise NotImplementedError

    def _refuse_closed(self) -> None:
        raise NotImplementedError
