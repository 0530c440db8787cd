"""`Engine`: a Hugging Face model, streamed and trained. The stable Python interface of MegaTrain.

It puts together what the rooms below offer: a ported model, a device, the pool and store that hold the state, the
streamer that walks schedules, and the sink that updates. Schedules are built once per shape of work, checked, and
kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from megatrain.checkpoint import export_model
from megatrain.device import Device, matmul_flops, open_device
from megatrain.engine import DTYPES, MicroBatch, Streamer, check_inputs, check_micro_batches
from megatrain.errors import BatchError, ConfigError, DeviceError, DoesNotFit, ModelError, PlanError
from megatrain.memory import Ledger, Pool, Store
from megatrain.model import PortedModel, port_model
from megatrain.optim import AdamW, warm_up
from megatrain.plan import (
    available_host_nbytes,
    available_threads,
    choose_policy,
    fit_activations,
    nearest_that_fits,
    step_flops,
)
from megatrain.schedule import (
    Schedule,
    Timeline,
    build_flush,
    build_forward,
    build_step,
    check,
    chrome_trace,
)
from megatrain.spec import ActivationPlan, ModelSpec, Policy, Precision, Work
from megatrain.train.sink import GradientCollector, OptimizerSink

Kind = Literal["step", "pending step", "forward", "flush"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a training step did.

    loss: mean over all target tokens of the step. grad_norm: global 2-norm of the gradient before clipping.
    tokens: target tokens. stall_seconds: time in which compute waited for copies or updates.
    """

    loss: float
    grad_norm: float
    tokens: int
    stall_seconds: float


class _Trace:
    """Timelines of a few steps, written when they are complete."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps
        self._timelines: list[Timeline] = []
        self._warm = False

    def add(self, timeline: Timeline) -> bool:
        """One more step; the file is written, and true returned, with the last of them."""
        if self._warm:
            self._timelines.append(timeline)
        self._warm = True
        if len(self._timelines) < self.steps:
            return False
        self.path.write_text(json.dumps(chrome_trace(self._timelines)))
        return True


class Engine:
    """Trains one causal language model whose state lives in host memory. Make it with `Engine.from_model`."""

    def __init__(
        self,
        ported: PortedModel,
        device: Device,
        policy: Policy,
        optimizer: AdamW,
        max_grad_norm: float | None,
        *,
        fits_activations: bool,
        owns_device: bool,
        seed: int,
    ) -> None:
        self.spec: ModelSpec = ported.spec
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self._ported, self._device = ported, device
        self._policy, self._fits_activations, self._owns_device = policy, fits_activations, owns_device
        self._pool = Pool(device, Ledger(_budgets(policy, device), one_memory=policy.shares_memory))
        self._schedules: dict[tuple[Kind, int, ActivationPlan], Schedule] = {}
        try:
            self._schedule(self._main_kind, Work((1,)))
        except BaseException:
            self._pool.release()
            raise
        self._store = Store(self.spec, policy, self._pool)
        threads = policy.host_threads or available_threads()
        self._sink = OptimizerSink(self.spec, policy, self._store, optimizer, max_grad_norm, threads)
        self._streamer = Streamer(ported, device, self._pool, policy, seed)
        self._steps = 0
        self._closed = False
        self._trace: _Trace | None = None

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        device: str | Device = "cpu",
        precision: Precision = "bf16",
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        policy: Policy | Literal["auto"] = "auto",
        seed: int = 0,
    ) -> Engine:
        """An engine that starts from a copy of the weights of a Hugging Face causal language model.

        model: left as it is, and not needed afterwards; its mode (`train()` or `eval()`) decides about dropout.
        device: `cpu`, `cuda:0`, `sim:SEED`, or an open device. precision: `bf16` computes in bfloat16 and keeps
        exact float32 masters; `fp32` does everything in float32. max_grad_norm: clip by the exact global norm, or
        `None` not to. policy: `auto`, or a `Policy` whose precision and clipping agree with the arguments. seed:
        decides all randomness inside layers.

        Raises `ModelError` for a model that cannot be streamed exactly, `PlanError` for a policy that contradicts
        the other arguments, `DoesNotFit` before anything is allocated, `DeviceError` for an absent device.
        """
        if precision not in DTYPES:
            raise PlanError(f"precision must be bf16 or fp32, not {precision!r}", where="precision")
        optimizer = optimizer or AdamW()
        opened = open_device(device) if isinstance(device, str) else device
        try:
            return cls._made(model, opened, precision, optimizer, max_grad_norm, policy, opened is not device, seed)
        except BaseException:
            if opened is not device:
                opened.close()
            raise

    @classmethod
    def _made(
        cls,
        model: nn.Module,
        opened: Device,
        precision: Precision,
        optimizer: AdamW,
        max_grad_norm: float | None,
        policy: Policy | Literal["auto"],
        owns_device: bool,
        seed: int,
    ) -> Engine:
        if policy == "auto":
            chosen = choose_policy(
                precision,
                shares_memory=opened.shares_memory,
                clips=max_grad_norm is not None,
                host_threads=available_threads(),
            )
        else:
            chosen = policy
            _refuse_contradictions(policy, precision, max_grad_norm, opened)
        ported = port_model(model, DTYPES[precision])
        engine = cls(
            ported,
            opened,
            chosen,
            optimizer,
            max_grad_norm,
            fits_activations=policy == "auto",
            owns_device=owns_device,
            seed=seed,
        )
        try:
            engine._store.load(dict(model.named_parameters()))
            warm_up()
        except BaseException:
            engine.close()
            raise
        return engine

    # Training -------------------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[MicroBatch], lr: float | None = None) -> StepOutput:
        """One optimizer step over all micro-batches; the loss is the mean over all their target tokens.

        Each micro-batch holds `input_ids` and `labels`, int64[batch, length] (labels as Hugging Face has them: -100 is
        no target, shifted inside), and whatever else the model's forward takes, such as `attention_mask`. `lr`
        replaces the optimizer's learning rate for this step.

        Raises `BatchError` for an unusable micro-batch and `NonFinite` for a loss or gradient that is not finite; the
        step is then not applied (without clipping, units above a gradient that is not finite may have been: the error
        names them). With clipping, updates are applied during the next step's forward;
        everything that reads the weights applies them first.
        """
        work = self._work(micro_batches, trains=True)
        if self._sink.pending and len(self._sink.pending) < len(self._sink.trained):
            self.flush()  # what an interrupted step has left
        schedule = self._schedule("pending step" if self._sink.pending else "step", work)
        self._sink.begin(self.optimizer.lr if lr is None else lr)
        self._device.stalled_seconds()
        result = self._streamer.run(schedule, micro_batches, self._sink, self._steps)
        norm = self._sink.finish()
        self._steps += 1
        trace, timeline = self._trace, self._streamer.timeline
        if trace is not None and timeline is not None and trace.add(timeline):
            self._trace = None
            self._device.timed = False
        return StepOutput(result.loss, norm, result.tokens, self._device.stalled_seconds())

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Parameter name -> float32 gradient of the step's loss, in the parameter's shape. Nothing is updated."""
        work = self._work(micro_batches, trains=True)
        self._settle()
        collector = GradientCollector(self.spec)
        self._streamer.run(self._schedule("step", work), micro_batches, collector, self._steps)
        return collector.gradients

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss over all target tokens of the micro-batches, without dropout. Nothing is updated."""
        work = self._work(micro_batches)
        self._settle()
        with self._ported.evaluation_mode():
            return self._streamer.run(self._schedule("forward", work), micro_batches, None).loss

    def flush(self) -> None:
        """Apply the updates that are pending, if any. Called by everything that reads the weights."""
        self._refuse_closed()
        if self._sink.pending:
            self._streamer.run(self._schedule("flush", Work((1,))), [], self._sink)

    # State ----------------------------------------------------------------------------------------------------------

    def master_weights(self) -> dict[str, Tensor]:
        """Parameter name -> a copy of its float32 master, in its shape, pending updates applied.

        Also of a state that an interrupted step has torn (see `applied_updates`), which everything else refuses.
        """
        self.flush()
        return {name: self._store.master(name) for name in self._store.names()}

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder with the float32 masters; it appears whole or not at all.

        Raises `ExportError` when it cannot be written.
        """
        self._settle()
        return export_model(self._ported, self.master_weights(), folder)

    def next_logits(self, input_ids: Tensor) -> Tensor:
        """Logits for the token after `input_ids`, int64[1, length]: float32[vocabulary], without dropout.

        Raises `BatchError` for another shape, or ids outside the vocabulary.
        """
        if input_ids.dim() != 2 or len(input_ids) != 1:
            raise BatchError(f"input_ids must be [1, length], not {list(input_ids.shape)}", where="next_logits")
        check_inputs(self.spec, {"input_ids": input_ids, "labels": input_ids}, "next_logits")
        self._settle()
        with self._ported.evaluation_mode():
            schedule = self._schedule("forward", Work((input_ids.numel(),)))
            return self._streamer.next_logits(schedule, input_ids)

    # What it is, and what it takes ------------------------------------------------------------------------------------

    def memory_table(self) -> dict[tuple[str, str], int]:
        """(tier, owner) -> bytes held now, activations inside layers not counted."""
        return self._pool.ledger.table()

    @property
    def policy(self) -> Policy:
        """How the model is streamed, as chosen for the last step that was prepared or run."""
        return self._policy

    def prepare(self, work: Work) -> Schedule:
        """Choose, build and prove what a step over such work needs, and allocate it; run nothing.

        Returns the schedule of a step with nothing pending (of a forward pass where nothing trains).
        """
        self._refuse_closed()
        return self._schedule(self._main_kind, work)

    def applied_updates(self) -> dict[str, int]:
        """Unit name -> optimizer updates that its state in host memory has had; pending ones are not counted."""
        return {unit.name: count for unit, count in zip(self.spec.units, self._sink.applied, strict=True)}

    def step_flops(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Necessary floating-point operations of a step over these micro-batches, padding not counted."""
        sequences: list[tuple[int, int]] = []
        for batch in micro_batches:
            rows, length = batch["input_ids"].shape
            mask = batch.get("attention_mask")
            real = mask.reshape(rows, -1).sum(dim=1).tolist() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            sequences += [(1, int(count)) for count in real] if real else [(rows, length)]
        return step_flops(self.spec, sequences)

    def peak_flops(self) -> float:
        """Floating-point operations per second of a large matrix product on the device, measured once."""
        return self._measured_flops

    @cached_property
    def _measured_flops(self) -> float:
        return matmul_flops(self._device, self._streamer.dtype)

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Write when each op of the next steps ran, once they have run, as a trace that Perfetto opens.

        The first step from now is left out, since it builds schedules and warms up.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        except OSError as error:
            raise ConfigError(f"cannot be written ({error.strerror})", where=f"trace {target}") from error
        self._device.timed = True
        self._trace = _Trace(target, steps)

    def close(self) -> None:
        """Stop the workers and give the memory back; what is pending is dropped with the weights."""
        if self._closed:
            return
        self._closed = True
        try:
            self._pool.release()
        finally:
            if self._owns_device:
                self._device.close()
        self._schedules.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Apply what is pending, and refuse a state in which some units are ahead of others."""
        self.flush()
        self._sink.refuse_torn()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise DeviceError("the engine is closed", where="engine", fix="make a new one with Engine.from_model")

    @property
    def _main_kind(self) -> Kind:
        """What runs over and over: steps, or forward passes where every parameter is frozen."""
        return "step" if self.spec.trained_numel else "forward"

    def _work(self, micro_batches: Sequence[MicroBatch], *, trains: bool = False) -> Work:
        self._refuse_closed()
        if trains and not self.spec.trained_numel:
            raise ModelError("every parameter is frozen", where=f"model {self.spec.name}", fix="freeze fewer of them")
        return check_micro_batches(self.spec, micro_batches)

    def _schedule(self, kind: Kind, work: Work) -> Schedule:
        """The schedule for this kind of run over this work: built and proven at first, its memory provided each time.

        Ops depend on the number of micro-batches, not on their sizes, so schedules are kept by number.
        """
        if self._fits_activations and kind in ("step", "pending step"):
            self._policy = fit_activations(self.spec, self._policy, work, self._memory_for_activations)
        key = (kind, work.micro_batches, self._policy.activations)
        if key not in self._schedules:
            schedule = _build(kind, self.spec, self._policy, work)
            check(schedule)
            self._schedules[key] = schedule
        try:
            self._pool.provide(self._schedules[key].buffers.values())
        except DoesNotFit as error:
            error.fix = f"{error.fix}; {nearest_that_fits(self.spec, self._policy, work, self._pool.ledger.budgets)}"
            raise
        return self._schedules[key]

    @cached_property
    def _memory_for_activations(self) -> int:
        """Bytes that were free once the state had been allocated."""
        return available_host_nbytes() if self._policy.shares_memory else self._device.free_nbytes()


def _budgets(policy: Policy, device: Device) -> dict[str, int]:
    """Bytes by tier: what the policy allows, else what the machine has now."""
    device_nbytes, host_nbytes = policy.device_budget_nbytes, policy.host_budget_nbytes
    budgets = {"host": available_host_nbytes() if host_nbytes is None else host_nbytes}
    if device_nbytes is not None:
        budgets["device"] = device_nbytes
    elif not device.shares_memory:
        budgets["device"] = device.free_nbytes()
    return budgets


def _build(kind: Kind, spec: ModelSpec, policy: Policy, work: Work) -> Schedule:
    match kind:
        case "flush":
            return build_flush(spec, policy)
        case "forward":
            return build_forward(spec, policy, work)
        case "step":
            return build_step(spec, policy, work)
        case "pending step":
            return build_step(spec, policy, work, pending="all")


def _refuse_contradictions(policy: Policy, precision: Precision, max_grad_norm: float | None, device: Device) -> None:
    if policy.precision != precision:
        raise PlanError(
            f"precision is {precision!r} but the policy's is {policy.precision!r}", where="policy.precision"
        )
    if policy.update == "during_backward" and max_grad_norm is not None:
        raise PlanError(
            "an exact global norm is known only after the backward pass",
            where="policy.update",
            fix="use update='next_forward', or max_grad_norm=None",
        )
    if policy.shares_memory and not device.shares_memory:
        raise PlanError(f"{device.name} does not compute in host memory", where="policy.shares_memory")
