"""The part of an engine that computes over micro-batches: steps, gradients, measurements, log-probabilities.

A base of `Engine` only to keep both files short, as `Restorable` is: it uses the engine's parts, and adds no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from megatrain.device import Device, timed
from megatrain.engine import KeepLogProbs, LossFn, MicroBatch, StepResult, Streamer, check_inputs, check_micro_batches
from megatrain.engine.batch import check_arguments, check_mapping, for_model, listed, staged
from megatrain.engine.losses import check_loss, own_entries
from megatrain.errors import BatchError, ModelError, NonFinite
from megatrain.memory import Disk, Store
from megatrain.model import PortedModel
from megatrain.optim import AdamW
from megatrain.spec import ModelSpec, Work
from megatrain.train.schedules import Schedules
from megatrain.train.sink import GradientCollector, OptimizerSink
from megatrain.train.trace import Trace
from megatrain.train.turns import Turn, one_at_a_time

MOST_NAMED = 3
"""Weights that are not finite, of which a message names so many."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a training step did.

    loss: mean over all target tokens of the step, or what the loss function makes it. grad_norm: global 2-norm of the
    gradient before clipping. tokens: target tokens. stall_seconds: time in which compute waited for copies or updates.
    written_nbytes: what it wrote to the disk tier. metrics: what the loss function reports, means like the loss.
    by_micro_batch: the same of each micro-batch, and its router auxiliary loss without the coefficient as `aux_loss`.
    """

    loss: float
    grad_norm: float
    tokens: int
    stall_seconds: float
    written_nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_micro_batch: Sequence[Mapping[str, float]] = ()


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
    _turn: Turn
    _store: Store
    _sound_at: int | None
    """Steps that had been done when the weights were last found to be finite."""
    leaves_times: bool
    """Whether each step leaves its `timeline` on every device: on a GPU that takes two events an op."""

    @one_at_a_time
    def step(
        self,
        micro_batches: Iterable[MicroBatch],
        lr: float | None = None,
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> StepOutput:
        """One optimizer step over all micro-batches; the loss is the mean over all their target tokens.

        micro_batches: a list, or anything that gives them one by one. Each holds `input_ids` and `labels`, int64[batch,
        length] (labels as Hugging Face has them: -100 is no target, shifted inside), and whatever else the model's
        forward reads, such as `attention_mask`. `lr` replaces the optimizer's learning rate for this step. `loss_fn`
        replaces cross-entropy: see `megatrain.losses`, where full logits never exist either. A router auxiliary loss
        that the model's config asks for counts by each micro-batch's share of the target tokens, or by
        `router_weights`, one for each micro-batch.

        Raises `BatchError` for an unusable micro-batch, or an entry that nothing reads, and `NonFinite` for a loss or
        gradient that is not finite; the step is then not applied (without clipping, units whose gradient is finite
        may have been: the error names them). With clipping, updates are applied during the next step's forward;
        everything that reads the weights applies them first.
        """
        batches, work = self._checked(micro_batches, loss_fn, router_weights, trains=True)
        if self._sink.pending and len(self._sink.pending) < len(self._sink.trained):
            self._flush()  # what an interrupted step has left
        schedule = self._schedules.get("pending step" if self._sink.pending else "step", work)
        self._sink.begin(self.optimizer.lr if lr is None else lr)
        self._device.stalled_seconds()
        before = self._written_nbytes
        wants_times = self.leaves_times or self._trace is not None
        with self._weights_blamed(), timed(self._device) if wants_times else nullcontext():
            try:
                result = self._streamer.run(schedule, batches, self._sink, self._steps, loss_fn, router_weights)
            finally:
                self._sink.at_rest()
            norm = self._sink.finish()
        self._steps += 1
        trace, timeline = self._trace, self._streamer.timeline
        if trace is not None and timeline is not None and trace.add(timeline):
            self._trace = None
        written = self._written_nbytes - before
        stalled = self._device.stalled_seconds()
        return StepOutput(
            result.loss, norm, result.tokens, stalled, written, dict(result.metrics), result.by_micro_batch
        )

    @one_at_a_time
    def gradients(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> dict[str, Tensor]:
        """Parameter name -> float32 gradient of the step's loss, in the parameter's shape. Nothing is updated."""
        batches, work = self._checked(micro_batches, loss_fn, router_weights, trains=True)
        self._settle()
        collector = GradientCollector(self.spec, self._sink.before_update)
        schedule = self._schedules.get("step", work)
        with self._weights_blamed():
            self._streamer.run(schedule, batches, collector, self._steps, loss_fn, router_weights)
        return collector.gradients

    @one_at_a_time
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Mean loss over all target tokens of the micro-batches, without dropout. Nothing is updated."""
        return self._measure(micro_batches, None).loss

    @one_at_a_time
    def measure(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> StepResult:
        """As `evaluate`, for any loss, with the target tokens and what the loss function reports; see `step`."""
        return self._measure(micro_batches, loss_fn, router_weights)

    @one_at_a_time
    def log_probs(self, micro_batches: Iterable[MicroBatch]) -> list[Tensor]:
        """The log-probability of each label, given the tokens before it: float32[batch, length] per micro-batch, on
        the cpu, at the places of the labels, and 0 where there is no target. Without dropout."""
        keeps = KeepLogProbs()
        self._measure(micro_batches, keeps)
        return keeps.kept

    @one_at_a_time
    def logits(self, inputs: MicroBatch) -> Tensor:
        """All logits, float32[batch, length, vocabulary] on the device, for what the model's forward takes.

        These are whole, so this is for few and short rows. Without dropout; nothing is updated.
        """
        check_mapping(inputs, "logits")
        check_inputs(self.spec, {"labels": inputs.get("input_ids"), **inputs}, "logits")
        check_arguments(self._ported.arguments, inputs, (), "logits")
        self._settle()
        schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
        with self._ported.evaluation_mode():
            return self._streamer.next_logits(schedule, for_model(inputs), kept=0)

    @one_at_a_time
    def flush(self) -> None:
        """Apply the updates that are pending, if any. Everything that reads the weights does that first."""
        self._flush()

    def run_ops_in(self, region: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter `region()` around all that is streamed, and nothing else. What it raises there breaks off a step that
        then counts as not begun; with clipping it is done again, bit for bit, whenever that is wanted."""
        self._streamer.region = region

    @property
    def router_aux_loss_coef(self) -> float | None:
        """What the router auxiliary loss is multiplied by; `None` where the model's config asks for none."""
        return self._ported.balance_coefficient

    # Inside -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _weights_blamed(self) -> Iterator[None]:
        """`NonFinite` out of the block names the weights that are not finite themselves, if that is what it is about.

        They are looked through once for each step that has been done: one that fails changes none of them.
        """
        try:
            yield
        except NonFinite as error:
            if self._sound_at == self._steps:
                raise
            bad = [name for name in self._store.names() if not bool(self._store.master(name).isfinite().all())]
            self._store.settle()
            if not bad:
                self._sound_at = self._steps
                raise
            named = ", ".join(bad[:MOST_NAMED]) + (f" and {len(bad) - MOST_NAMED:,} more" if bad[MOST_NAMED:] else "")
            fix = "start from other weights: these were damaged, or are of a run that had diverged"
            what = f"{error.what}, as are values of the weights themselves: {named}"
            raise NonFinite(what, where=error.where, fix=fix, parameters=bad) from error

    @property
    def _written_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.written_nbytes

    def _checked(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None,
        router_weights: Sequence[float] | None = None,
        *,
        trains: bool = False,
    ) -> tuple[list[MicroBatch], Work]:
        """The micro-batches as a list, and the work that they are. Raises what is wrong before anything is computed."""
        if trains and not self.spec.trained_numel:
            raise ModelError("every parameter is frozen", where=f"model {self.spec.name}", fix="freeze fewer of them")
        check_loss(loss_fn)
        batches = staged(self._device, listed(micro_batches), own_entries(loss_fn))
        work = check_micro_batches(self.spec, batches)
        if router_weights is not None and len(router_weights) != len(batches):
            what = f"{len(router_weights)} router_weights for {len(batches)} micro-batches"
            raise BatchError(what, where="step", fix="give one for each micro-batch")
        for index, batch in enumerate(batches):
            check_arguments(self._ported.arguments, batch, own_entries(loss_fn), f"micro-batch {index}")
        return batches, work

    def _measure(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None,
        router_weights: Sequence[float] | None = None,
    ) -> StepResult:
        batches, work = self._checked(micro_batches, loss_fn, router_weights)
        self._settle()
        schedule = self._schedules.get("forward", work)
        with self._weights_blamed(), self._ported.evaluation_mode():
            return self._streamer.run(schedule, batches, None, 0, loss_fn, router_weights)

    def _flush(self) -> None:
        if self._sink.pending:
            self._streamer.run(self._schedules.get("flush", Work((1,))), [], self._sink)

    def _settle(self) -> None:
        """Apply what is pending, and refuse a state in which some units are ahead of others."""
        self._flush()
        self._sink.refuse_torn()
