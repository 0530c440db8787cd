"""`Engine`: a Hugging Face model, streamed and trained. The stable Python interface of MegaTrain.

It puts together what the rooms below offer: a ported model, a device, the pool and store that hold the state, the
streamer that walks schedules, and the sink that updates. Schedules are built once per shape of work, checked, and
kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from megatrain.checkpoint import Checkpoint, ExportOptions, export_model, open_checkpoint
from megatrain.device import Device, matmul_flops
from megatrain.engine import MicroBatch, Streamer, check_inputs, count_targets, sequences_of
from megatrain.errors import ConfigError, DoesNotFit, ModelError, PlanError
from megatrain.fields import checked
from megatrain.memory import Disk, Ledger, Pool, Store
from megatrain.model import (
    FreshSource,
    ModelSource,
    PortedModel,
    PretrainedSource,
    Progress,
    Source,
    freeze_parameters,
    refuse_other_kinds,
    speak,
)
from megatrain.optim import AdamW
from megatrain.plan import available_host_nbytes, available_threads, step_flops
from megatrain.plan.report import amount
from megatrain.schedule import Schedule, Timeline
from megatrain.spec import ModelSpec, Policy, Precision, Work
from megatrain.train.assembly import assemble
from megatrain.train.options import EngineOptions, Seed, checked_options
from megatrain.train.restorable import Restorable
from megatrain.train.restored import NewMoments, frozen_in, optimizer_in
from megatrain.train.saver import Saver
from megatrain.train.schedules import Kind, Schedules, budgets
from megatrain.train.sink import OptimizerSink
from megatrain.train.stepping import StepOutput, Stepping
from megatrain.train.trace import Trace
from megatrain.train.turns import Turn, one_at_a_time
from megatrain.train.vetted import NOT_ASKED


class Engine(Stepping, Restorable):
    """Trains one causal language model whose state lives in host memory. Make it with `Engine.from_model`."""

    def __init__(
        self,
        ported: PortedModel,
        device: Device,
        policy: Policy,
        optimizer: AdamW,
        max_grad_norm: float | None,
        disk: Disk | None,
        *,
        fits_activations: bool,
        owns_device: bool,
        seed: int,
    ) -> None:
        self.spec: ModelSpec = ported.spec
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self._ported, self._device = ported, device
        self._owns_device, self._disk = owns_device, disk
        ledger = Ledger(budgets(policy, device, disk), one_memory=policy.shares_memory)
        self._pool = Pool(device, ledger, disk, [unit.name for unit in self.spec.units], policy.transit)
        self._store = Store(self.spec, policy, self._pool)
        self._schedules = Schedules(self._store, policy, device, fits_activations=fits_activations)
        threads = policy.host_threads or available_threads()
        try:
            self._schedules.get(self._main_kind, Work((1,)))
            self._sink = OptimizerSink(self.spec, policy, optimizer, max_grad_norm, threads, device)
            self._streamer = Streamer(ported, device, self._pool, policy, seed)
        except BaseException:
            self._pool.release()
            raise
        self._saver = Saver(ported, self._store)
        self._sink.before_update = self._saver.before_update
        self._steps, self._sound_at = 0, None
        self._turn = Turn()
        self.checked = NOT_ASKED  # whether this architecture is known to be computed right
        self._trace: Trace | None = None
        self.leaves_times = False

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        device: str | torch.device | Device = "cpu",
        precision: Precision = "bf16",
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        policy: Policy | Literal["auto"] = "auto",
        seed: int = 0,
        verify: bool = True,
        disk: str | Path | Sequence[str | Path] | Disk = (),
    ) -> Engine:
        """An engine that starts from a copy of the weights of a Hugging Face causal language model.

        model: left as it is, and not needed afterwards; its mode (`train()` or `eval()`) decides about dropout, and
        parameters that need no gradient are frozen: they cost neither gradients nor optimizer state.
        device: `cpu`, `cuda:0`, `sim:SEED`, a `torch.device`, or an open device. precision: `bf16` computes in
        bfloat16 and keeps exact float32 masters; `fp32` does everything in float32. optimizer: its defaults if not
        given. max_grad_norm: clip by the exact global norm, or `None` not to. policy: `auto`, or a `Policy` whose
        precision and clipping agree with the arguments. seed: decides all randomness inside layers. verify: at the
        first meeting of an architecture, compare a small model of its kind with the stock code, and refuse to go on
        with one that is computed wrong. disk: folders, on quick drives, for the state that the policy puts there.

        Raises `ModelError` for a model that cannot be streamed exactly, `PlanError` for a policy that contradicts
        the other arguments, `ConfigError` for an argument that is none, and in one of several processes (torchrun,
        srun, mpirun) where anything trains, `DoesNotFit` before anything is allocated, `DeviceError` for an absent
        device.
        """
        refuse_other_kinds(model)
        options: EngineOptions = {"device": device, "precision": precision, "optimizer": optimizer, "policy": policy}
        options |= {"max_grad_norm": max_grad_norm, "seed": seed, "verify": verify, "disk": disk}
        options = checked_options(options)
        source = ModelSource(model)  # type: ignore[arg-type]  # everything but a PreTrainedModel has been refused
        return cls.from_source(source, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        attention: str = "auto",
        trust_remote_code: bool = False,
        freeze: Sequence[str] = (),
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine over a local folder or a hub name, whose files stream straight into the store, unit by unit.

        attention: kernel by its Hugging Face name, or `auto`, the library's choice for the model. freeze: glob
        patterns of parameter names. progress: called with (done, total). options: as for `from_model`.
        Raises what `from_model` raises, and `ModelError` for files that are missing, torn or of another model.
        """
        options = checked_options(options)
        pretrained = PretrainedSource(source, attention=attention, trust_remote_code=trust_remote_code)
        freeze_parameters(pretrained.model, freeze)
        return cls.from_source(pretrained, progress=progress, **options)

    @classmethod
    def from_config(
        cls,
        config: str | Path | dict[str, Any],
        *,
        attention: str = "auto",
        trust_remote_code: bool = False,
        freeze: Sequence[str] = (),
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine over a fresh model, initialised by its own initialiser from `seed`, bit-equal to the stock one.

        config: a local folder, a `config.json`, a hub name, or the fields themselves with `model_type` among them.
        The rest is as for `from_pretrained`.
        """
        options = checked_options(options)
        fresh = FreshSource(config, options.get("seed", 0), attention=attention, trust_remote_code=trust_remote_code)
        freeze_parameters(fresh.model, freeze)
        return cls.from_source(fresh, progress=progress, **options)

    @classmethod
    def from_source(
        cls,
        source: Source,
        *,
        ported: PortedModel | None = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine over any source of structure and weights; options and errors as for `from_model`.

        ported: the source's model as `port_model` has taken it apart in the same precision, if it has been already.
        """
        return assemble(cls, unverified, source, ported, progress, options)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | str | Path,
        *,
        source: Source | None = None,
        new: NewMoments = "refuse",
        attention: str = "auto",
        trust_remote_code: bool = False,
        progress: Progress | None = None,
        ported: PortedModel | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine that goes on where `save` was called: the same bits whatever the policy, tiers and device memory.

        checkpoint: a folder `step-...`, which is checked first, or an open one. What was frozen stays frozen; the
        optimizer is that of the checkpoint unless one is given; clipping, device and policy are as for `from_model`.
        source: the checkpoint as a source, if there is one, with what is to be frozen.
        new: whether what trains now and did not is refused, or begins with moments of zero.

        Raises `DamagedCheckpoint`, `CheckpointError`, and what `from_pretrained` raises.
        """
        options = checked_options(options)
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        options.setdefault("optimizer", optimizer_in(opened))
        if source is None:
            source = PretrainedSource(opened.folder, attention=attention, trust_remote_code=trust_remote_code)
            freeze_parameters(source.model, frozen_in(opened, (name for name, _ in source.model.named_parameters())))
        engine = cls.from_source(source, ported=ported, progress=progress, **options)
        try:
            engine._take_up(opened, new)
        except BaseException:
            engine.close()
            raise
        return engine

    # State ----------------------------------------------------------------------------------------------------------

    @one_at_a_time
    def master_weights(self) -> dict[str, Tensor]:
        """Parameter name -> a copy of its float32 master, in its shape, pending updates applied.

        Also of a state that an interrupted step has torn (see `applied_updates`), which everything else refuses.
        """
        self._flush()
        return {name: self._store.master(name) for name in self._store.names()}

    @one_at_a_time
    def master(self, name: str) -> Tensor:
        """A copy of one parameter's float32 master, in its shape, pending updates applied. Raises `ModelError` for a
        name that no parameter has."""
        if name not in (names := list(self._store.names())):
            near = get_close_matches(str(name), names, n=1, cutoff=0.0)
            raise ModelError(f"no parameter is called {name!r}", where="master", fix=f"did you mean {near[0]!r}?")
        self._flush()
        return self._store.master(name)

    @one_at_a_time
    def weight_view(self, name: str) -> Tensor | None:
        """One parameter where it lies in host memory, in its shape, pending updates applied: float32, or in bf16 the
        bfloat16 weight that streams. It changes as training goes on, and who writes to it changes the weight.

        `None` where the policy puts it elsewhere. It is that memory for as long as no other policy is adopted.
        """
        self._flush()
        return self._store.view(name)

    @one_at_a_time
    def save_pretrained(self, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
        """Write a Hugging Face folder, streamed unit by unit; it appears whole or not at all.

        precision: of the weights, the exact float32 masters or those rounded to bfloat16. facts: name -> what the
        model card tells about the training. write_more: called with the folder before it appears, for a tokenizer.
        progress: called with (done, total) bytes. Returns the folder, absolute. Raises `ExportError` when it cannot be
        written; a model that stood there then stays.
        """
        self._settle()
        try:
            return export_model(self._ported, self._store.master, folder, **options)
        finally:
            self._store.settle()

    @one_at_a_time
    def generate(
        self, /, input_ids: Tensor, attention_mask: Tensor | None = None, *, seed: int = 0, **options: Any
    ) -> Tensor:
        """Continue `input_ids` int64[rows, length] with the library's own `generate`: int64[rows, length + new].

        attention_mask: int64[rows, length], 0 where a shorter prompt is padded, on the left. seed: decides what is
        drawn; the caller's random state stays as it was. options: what the `generate` of transformers takes, such as
        `max_new_tokens`, `do_sample`, `temperature`, `num_beams`, `streamer`, `use_cache=False`; defaults are those of
        the model's generation config. With `return_dict_in_generate=True` it returns what the library then does.

        Without dropout; pending updates are applied first. Each new token streams the weights once. The cache of keys
        and values lives on the device for the time of the call, and belongs to no entry of the ledger.

        Raises `BatchError` for ids outside the vocabulary and for a text that could outgrow the model's positions,
        `ConfigError` for an option that the library refuses, `NonFinite` for logits that are not numbers.
        """
        check_inputs(self.spec, {"input_ids": input_ids, "labels": input_ids}, "generate")
        seed = checked(seed, Seed, ConfigError, "seed")
        self._settle()

        def last_logits(inputs: Mapping[str, Any], kept: int) -> Tensor:
            schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
            return self._streamer.next_logits(schedule, inputs, kept)

        # The library's own work runs on the stream that fills the cache, so neither frees what the other still reads.
        with (
            self._weights_blamed(),
            self._ported.evaluation_mode(),
            self._device.preserved_random_state(),
            self._device.alongside(),
        ):
            self._device.seed(seed)
            found: Tensor = speak(
                self._ported, last_logits, self._device.torch_device, input_ids, attention_mask, options
            )
            self._device.synchronize()  # before another stream may have what was allocated on this one
        return found

    @property
    def generation_config(self) -> Any:
        """The library's `GenerationConfig` that `generate` starts from: the model's own, which may be changed."""
        return self._ported.skeleton.generation_config

    @property
    def config(self) -> Any:
        """The library's config of the model, as it is saved. What shapes the computation is fixed by now."""
        return self._ported.skeleton.config

    # What it is, and what it takes ------------------------------------------------------------------------------------

    def memory_table(self) -> dict[tuple[str, str], int]:
        """(tier, owner) -> bytes held now, activations inside layers not counted."""
        return self._pool.ledger.table()

    def host_nbytes_left(self) -> int:
        """Bytes of host memory that are free now, within the policy's budget where it has one."""
        free, budget = available_host_nbytes(), self.policy.host_budget_nbytes
        if budget is None:
            return free
        ledger = self._pool.ledger
        held = ledger.nbytes("host") + (ledger.nbytes("device") if ledger.one_memory else 0)
        return max(0, min(free, budget - held))

    @property
    def policy(self) -> Policy:
        """How the model is streamed, as chosen for the last step that was prepared or run."""
        return self._schedules.policy

    @property
    def timeline(self) -> Timeline | None:
        """When the ops of the last run were done, where the device takes times; of steps also by `leaves_times`."""
        return self._streamer.timeline

    @one_at_a_time
    def adopt(self, policy: Policy) -> None:
        """Stream by another policy from now on; no number changes. What is pending is applied first.

        State moves to the tiers that the policy names. Raises `PlanError` for one that differs in what numbers depend
        on, `DoesNotFit` and `DiskError` where a tier refuses; the state is whole then, and the old policy holds.
        """
        checked(policy, Policy, PlanError, "policy")
        self._settle()
        self._saver.wait()
        before, saves = self.policy, self._saver.is_reserved
        self._take(policy)
        try:
            if saves:
                self._saver.reserve()  # ahead of the slots of the next schedule, which may take what there is
        except DoesNotFit:
            self._take(before)
            raise

    def _take(self, policy: Policy) -> None:
        self._schedules.adopt(policy)
        self._streamer.policy = policy
        self._sink.adopt(policy)

    @one_at_a_time
    def prepare(self, work: Work) -> Schedule:
        """Choose, build and prove what a step over such work needs, and allocate it; run nothing.

        Returns the schedule of a step with nothing pending (of a forward pass where nothing trains).
        """
        return self._schedules.get(self._main_kind, checked(work, Work, PlanError, "work"))

    def applied_updates(self) -> dict[str, int]:
        """Unit name -> optimizer updates that its state in host memory has had; pending ones are not counted."""
        return {unit.name: count for unit, count in zip(self.spec.units, self._sink.applied, strict=True)}

    def step_flops(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Necessary floating-point operations of a step over these micro-batches.

        What a mask hides does not count, packed sequences attend to themselves alone, and only targets need the head.
        """
        batches = list(micro_batches)
        sequences = [each for batch in batches for each in sequences_of(batch)]
        return step_flops(self.spec, sequences, sum(count_targets(batch) for batch in batches))

    @one_at_a_time
    def peak_flops(self) -> float:
        """Floating-point operations per second of a large matrix product on the device, measured once."""
        return matmul_flops(self._device, self._streamer.dtype)

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Write when each op of the next steps ran, once they have run, as a trace that Perfetto opens.

        The first step from now is left out, since it builds schedules and warms up.
        """
        self._trace = Trace(path, steps)

    def close(self) -> None:
        """Stop the workers and give the memory back; what is pending is dropped with the weights.

        In a forked child there is nothing to stop, and what the engine holds belongs to the process that made it.
        """
        if self._turn.is_closed or self._turn.process.is_elsewhere:
            return
        with self._turn.of("close"):
            self._turn.is_closed = True
            self._saver.abandon()
            try:
                self._pool.release()
            finally:
                if self._disk is not None:
                    self._disk.close()
                if self._owns_device:
                    self._device.close()
            self._schedules.clear()

    def __repr__(self) -> str:
        """What it trains, how, how far it is and what it holds, on one line; at any time, on any thread."""
        numel, trained = self.spec.numel, self.spec.trained_numel
        frozen = "" if trained == numel else f", {trained:,} trained"
        state = "closed" if self._turn.is_closed else f"{self._steps:,} steps, {self._held()}"
        how = f"{self.policy.precision} on {self._device.name}"
        return f"<Engine of {self.spec.name}: {numel:,} parameters{frozen}, {how}, {state}>"

    def _held(self) -> str:
        totals: dict[str, int] = {}
        for (tier, _), nbytes in self.memory_table().items():
            totals[tier] = totals.get(tier, 0) + nbytes
        return ", ".join(f"{amount(nbytes)} on the {tier}" for tier, nbytes in totals.items() if nbytes)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _main_kind(self) -> Kind:
        """What runs over and over: steps, or forward passes where every parameter is frozen."""
        return "step" if self.spec.trained_numel else "forward"


def unverified(model: nn.Module, device: str, policy: Policy) -> Engine:
    """An engine to check with, which cannot be checked itself."""
    return Engine.from_model(model, device, policy.precision, policy=policy, verify=False)


__all__ = ["Engine", "StepOutput", "unverified"]
