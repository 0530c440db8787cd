"""`Engine` trains a Hugging Face model by streaming its layers. The stable Python interface of MegaTrain.

It combines a model split into units, a device, the pool and store with the training state, the streamer that executes
schedules, and the optimizer sink. Schedules are built and checked once per shape of work, and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from megatrain.checkpoint import Checkpoint, ExportOptions, open_checkpoint
from megatrain.device import Device, matmul_flops, open_device, timed
from megatrain.dist import ALONE
from megatrain.engine import (
    KeepLogProbs,
    LossFn,
    MicroBatch,
    StepInput,
    StepResult,
    Streamer,
    check_inputs,
    count_targets,
    sequences_of,
)
from megatrain.engine.batch import check_arguments, check_mapping, model_entries
from megatrain.engine.context import OpContext
from megatrain.errors import CheckpointError, ConfigError, MegaTrainError, ModelError, PlanError
from megatrain.formatting import amount
from megatrain.memory import Disk, Ledger, Pool, SharedMemory, Store
from megatrain.model import (
    Fills,
    FreshSource,
    ModelSource,
    PortedModel,
    Progress,
    Source,
    base_of,
    freeze_parameters,
    pretrained_source,
    refuse_other_kinds,
    speak,
)
from megatrain.model.skeleton import on_the_cpu
from megatrain.optim import AdamW, warm_up
from megatrain.plan import available_host_nbytes, step_flops
from megatrain.schedule import Schedule, Timeline
from megatrain.spec import Limits, ModelSpec, Numerics, Policy, Precision, Work
from megatrain.spec.layout import Ownership
from megatrain.spec.validate_fields import checked
from megatrain.train.async_save import Save, Saver
from megatrain.train.events import StepOutput
from megatrain.train.nonfinite import NonfiniteCauses
from megatrain.train.one_call_at_a_time import TakesTurns, Turn, one_at_a_time
from megatrain.train.optimizer_sink import GradientCollector, OptimizerSink
from megatrain.train.options import (
    EngineOptions,
    MoreOptions,
    Seed,
    checked_options,
    disk_of,
    files_of,
    limits_of,
    numerics_of,
    optimizer_of,
    policy_of,
    ported_of,
    refuse_other_groups,
    world_of,
)
from megatrain.train.parity import NOT_ASKED, short_check
from megatrain.train.restore import (
    NewMoments,
    as_saved,
    facts_in,
    fill,
    frozen_in,
    missed_in,
    optimizer_in,
    read_moments,
    refuse_other_base,
    refuse_other_shapes,
    refuse_unknown,
    source_in,
    weights_in,
)
from megatrain.train.save_from_rank_zero import export_together
from megatrain.train.schedule_cache import Kind, Schedules, budgets
from megatrain.train.step_inputs import checked_input
from megatrain.train.timeline_file import Trace


class Engine(TakesTurns):
    """Trains a causal language model whose state is in host memory. Construct it with `Engine.from_model` and the
    like."""

    def __init__(self, ported: PortedModel, device: Device, options: EngineOptions) -> None:
        """Allocates memory without filling it."""
        self.world = world = options.get("world") or ALONE
        ported.share(world.size)
        self.structure: ModelSpec = ported.structure
        optimizer, max_grad_norm = optimizer_of(options, self.structure), options.get("max_grad_norm", 1.0)
        self.numerics, self.limits = numerics_of(options), limits_of(options)
        policy, fits = policy_of(options, device, self.structure), options.get("policy", "auto") == "auto"
        self._ported, self._device, self._disk = ported, device, disk_of(options, policy)
        self._checked = partial(checked_input, ported, device, world)
        self._owns_device = device is not options.get("device", "cpu")
        ledger = Ledger(budgets(self.limits, device, self._disk), one_memory=policy.shares_memory)
        shared, names = SharedMemory.of(self.structure, self.numerics, policy, device, world), self.structure.names
        self._pool = Pool(device, ledger, self._disk, names, policy.transfer, shared, files_of(ported))
        owned = Ownership(world.rank, max(1, policy.shard_nbytes // self.numerics.weight_nbytes))
        self._store = Store(self.structure, self.numerics, policy, self._pool, owned, world.together)
        self._schedules = Schedules(ported, self._store, self.numerics, policy, device, world, fits_activations=fits)
        how = self.structure, self.numerics, policy, optimizer, max_grad_norm, device
        try:
            self._schedules.get(self._main_kind, Work((1,)))
            self._sink = OptimizerSink(*how, owned, world)
            seed = options.get("seed", 0)
            context = OpContext(ported, device, self._pool, self.numerics, policy, seed, world)
            self._streamer = Streamer(context)
        except BaseException:
            self._pool.release()
            raise
        self._saver = Saver(ported, self._store, world.aside())
        self._sink.before_update = self._saver.before_update
        self._causes = NonfiniteCauses(self._store, self._streamer)
        self._steps, self._turn = 0, Turn()
        self.checked = NOT_ASKED  # whether this architecture is known to be computed correctly
        self._trace: Trace | None = None
        self.record_timeline = False

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        device: str | torch.device | Device = "cpu",
        precision: Precision | None = None,
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        policy: Policy | Literal["auto"] = "auto",
        seed: int = 0,
        verify: bool = True,
        disk: str | Path | Sequence[str | Path] | Disk = (),
        limits: Limits | None = None,
        numerics: Numerics | None = None,
        **more: Unpack[MoreOptions],
    ) -> Engine:
        """An engine that starts from a copy of the weights of a Hugging Face causal language model.

        model: not changed, and not needed afterwards; its mode (`train()` or `eval()`) decides about dropout, and
        parameters without `requires_grad` are frozen: they need neither gradients nor optimizer state.
        device: `cpu`, `cuda:0`, `sim:SEED`, a `torch.device`, or an open device. precision: `bf16` (default) computes
        in bfloat16 with exact float32 masters; `fp32` does everything in float32. optimizer: default `AdamW()`.
        max_grad_norm: clip by the exact global norm; `None` disables clipping. policy: `auto`, or a `Policy` that
        agrees with the other arguments. seed: determines all randomness inside layers. verify: for an architecture not
        seen before, compare a small model of its kind with the stock code, and refuse one that is computed wrongly.
        disk: folders, on fast drives, for the state that the policy places there. limits: bytes of each tier that it
        may use; by default all that is free. numerics: all that numbers depend on, including the precision. world: the
        ranks that train together, calling their engines alike; by default torchrun's processes, if anything trains.
        image_row: a micro-batch of one row with images, as large as any; the layers of the encoder that it goes through
        are then streamed like the model's other layers, where that is exact, and stay in the prologue otherwise.

        Raises `ModelError` for a model that cannot be streamed exactly, `PlanError` for a policy that contradicts
        the other arguments, `ConfigError` for an invalid argument, `RankError` if other ranks do not connect,
        `DoesNotFit` before anything is allocated, `DeviceError` for a missing device.
        """
        model = base_of(model)
        refuse_other_kinds(model)
        options: EngineOptions = {"device": device, "precision": precision, "numerics": numerics, "policy": policy}
        options |= {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "limits": limits, "disk": disk}
        given: Any = {**options, "seed": seed, "verify": verify, **more}
        return cls.from_source(ModelSource(model), **given)  # type: ignore[arg-type]  # no other kind is left

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        attention: str = "auto",
        trust_remote_code: bool = False,
        freeze: Sequence[str] = (),
        adapter: Any = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine for a local folder or a hub name, whose files stream straight into the store, unit by unit.

        attention: kernel by its Hugging Face name, or `auto`, the library's choice. freeze: glob patterns of parameter
        names. adapter: a `PeftConfig`, or the folder of one to continue; then only the adapter trains. If `source` is
        such a folder, its base and adapter are loaded. progress: called with (done, total). options, errors: as for
        `from_model`, and `ModelError` for files that are missing, damaged or of another model. Tensors of the files
        that the model does not read are copied by `save_pretrained` and `save`.
        """
        options = checked_options(options)
        how: Any = {"attention": attention, "trust_remote_code": trust_remote_code}
        pretrained = pretrained_source(source, adapter, options.get("seed", 0), **how)
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
        """An engine for a fresh model, initialised by its own code from `seed`, bit-equal to the stock model.

        config: a local folder, a `config.json`, a hub name, or the fields themselves with `model_type` among them.
        Other arguments as for `from_pretrained`.
        """
        options = checked_options(options)
        fresh = FreshSource(config, options.get("seed", 0), attention=attention, trust_remote_code=trust_remote_code)
        freeze_parameters(fresh.model, freeze)
        return cls.from_source(fresh, progress=progress, **options)

    @classmethod
    @on_the_cpu()
    def from_source(
        cls,
        source: Source,
        *,
        ported: PortedModel | None = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine for any source of structure and weights; options and errors as for `from_model`.

        ported: the source's model, if `port_model` has already split it in the same precision.
        """
        options = checked_options(options)
        device = options.get("device", "cpu")
        opened = device if isinstance(device, Device) else open_device(device)
        try:
            options["world"] = world_of(options, source.model, opened)
            checked_now = short_check(source.model, unverified) if options.get("verify", True) else NOT_ASKED
            engine = cls(ported or ported_of(source, options), opened, options)
            engine.checked = checked_now
        except BaseException:
            if opened is not device:
                opened.close()
            raise
        try:
            engine.fill(source, progress)
            warm_up()
        except BaseException:
            engine.close()
            raise
        return engine

    @classmethod
    @on_the_cpu()
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
        """An engine that continues where `save` was called: bit-exact, whatever the policy, tiers and device memory.

        checkpoint: a folder `step-...`, which is checked first, one of another trainer, or an open one. Frozen
        parameters stay frozen; the optimizer is the checkpoint's unless given; clipping, device and policy are as for
        `from_model`. source: the checkpoint as a source, frozen as wanted, if there is one, or another trainer's model.
        new: whether parameters that did not train before are refused, or start with zero moments. Raises
        `DamagedCheckpoint`, `CheckpointError`, and what `from_pretrained` raises.
        """
        options = checked_options(options)
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        given = source
        source = source_in(opened, given, attention=attention, trust_remote_code=trust_remote_code)
        if given is None:
            freeze_parameters(source.model, frozen_in(opened, (name for name, _ in source.model.named_parameters())))
            ported = ported_of(source, options, of_checkpoint=True)
        options.setdefault("optimizer", optimizer_in(opened))
        engine = cls.from_source(source, ported=ported, progress=progress, **options)
        try:
            engine._take_up(opened, new)
        except BaseException:
            engine.close()
            raise
        return engine

    # Micro-batches ---------------------------------------------------------------------------------------------------

    @one_at_a_time
    def step(
        self,
        micro_batches: Iterable[MicroBatch],
        lr: float | None = None,
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> StepOutput:
        """One optimizer step over all micro-batches; the loss is the mean over all their target tokens.

        micro_batches: an iterable of dicts with `input_ids` and `labels`, int64[batch, length] (labels as in Hugging
        Face: -100 is no target, shifted inside), and anything else that the model's forward reads, such as
        `attention_mask`. lr: learning rate of this step instead of the optimizer's; `learning_rates` are scaled in
        proportion. loss_fn: replaces cross-entropy (see `megatrain.losses`; full logits never exist there either). A
        router auxiliary loss that the model's config enables is weighted by each micro-batch's share of the target
        tokens, or by `router_weights`, one per micro-batch.

        Raises `BatchError` for an unusable micro-batch or an entry that nothing reads, and `NonFinite` for a loss or
        gradient that is not finite; the step is then not applied (without clipping, units with finite gradients may
        have been updated: the error names them). With clipping, updates are applied during the next step's forward;
        everything that reads the weights applies them first.
        """
        asked = self._checked(micro_batches, loss_fn, router_weights, trains=True)
        if self._sink.is_interrupted:
            self._flush()  # updates left by an interrupted step
        schedule = self._schedules.get("pending step" if self._sink.pending else "step", asked.work)
        self._sink.begin(self.optimizer.lr if lr is None else lr)
        self._device.stalled_seconds()
        before = self._written_nbytes
        wants_times = self.record_timeline or self._trace is not None
        again = partial(self._forward, asked, self._steps)
        with self._causes.named(self._steps, again), timed(self._device) if wants_times else nullcontext():
            try:
                state = self._streamer.begin(schedule, asked, self._sink, self._steps)
                with self._streamer.running(state) as run:
                    run()
                result = self._streamer.result(state)
            finally:
                self._sink.at_rest()
            norm = self._sink.finish()
        self._steps += 1
        timeline = None if self._trace is None else self._streamer.timeline
        if self._trace is not None and timeline is not None and self._trace.add(timeline):
            self._trace = None
        written = sum(self.world.exchange("bytes written", self._written_nbytes - before)) if self._disk else 0
        stalled, metrics = self._device.stalled_seconds(), dict(result.metrics)
        return StepOutput(result.loss, norm, result.tokens, stalled, written, metrics, result.by_micro_batch)

    @one_at_a_time
    def set_optimizer(self, optimizer: AdamW) -> None:
        """Use these hyperparameters from the next step on; pending updates keep those of their own step.

        Raises `ConfigError` if the sets of parameters that decay, or share a learning rate, would change.
        """
        refuse_other_groups(self.optimizer, optimizer)
        self._sink.optimizer = optimizer

    @one_at_a_time
    def gradients(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> dict[str, Tensor]:
        """Parameter name -> float32 gradient of the step's loss, in the parameter's shape. Nothing is updated."""
        asked = self._checked(micro_batches, loss_fn, router_weights, trains=True)
        self._settle()
        collector = GradientCollector(self.structure, self._sink.before_update, self._store)
        schedule = self._schedules.get("step", asked.work)
        with self._causes.named(self._steps, partial(self._forward, asked, self._steps)):
            self._streamer.run_schedule(schedule, asked, collector, self._steps)
        return collector.finish()

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
    def log_probs(self, micro_batches: Iterable[MicroBatch], *, of_base: bool = False) -> list[Tensor]:
        """The log-probability of each label given the tokens before it: float32[batch, length] per micro-batch, on
        the CPU, at the labels' positions, 0 without a target. of_base: without the adapter."""
        keeps = KeepLogProbs()
        with self._ported.without_adapter() if of_base else nullcontext():
            self._measure(micro_batches, keeps)
        return keeps.kept

    @one_at_a_time
    def logits(self, inputs: MicroBatch) -> Tensor:
        """All logits, float32[batch, length, vocabulary] on the device, for arguments of the model's forward.

        They are not chunked, so use few and short rows. Without dropout; nothing is updated.
        """
        check_mapping(inputs, "logits")
        check_inputs(self.structure, {"labels": inputs.get("input_ids"), **inputs}, "logits")
        check_arguments(self._ported.arguments, inputs, (), "logits")
        self._settle()
        schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
        with self._ported.evaluation_mode():
            return self._streamer.next_logits(schedule, model_entries(inputs), logits_to_keep=0)

    @one_at_a_time
    def generate(
        self, /, input_ids: Tensor, attention_mask: Tensor | None = None, *, seed: int = 0, **options: Any
    ) -> Tensor:
        """Continue `input_ids` int64[rows, length] with transformers' own `generate`: int64[rows, length + new].

        attention_mask: int64[rows, length], 0 for padding, which is on the left. seed: determines sampling; the
        caller's random state does not change. options: arguments of transformers' `generate`, such as
        `max_new_tokens`, `do_sample`, `temperature`, `num_beams`, `streamer`, `use_cache=False`, and what else the
        model's forward reads, `pixel_values` say; defaults come from the model's generation config. With
        `return_dict_in_generate=True` it returns what transformers then does.

        Without dropout; pending updates are applied first. Each new token streams the weights once. The KV cache is on
        the device during the call, and not counted in the ledger.

        Raises `BatchError` for ids outside the vocabulary and for a text that could exceed the model's positions,
        `ConfigError` for an option that transformers refuses, `NonFinite` for logits that are not finite.
        """
        check_inputs(self.structure, {"input_ids": input_ids, "labels": input_ids}, "generate")
        seed = checked(seed, Seed, ConfigError, "seed")
        self._settle()

        def last_logits(inputs: Mapping[str, Any], kept: int) -> Tensor:
            schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
            return self.world.of_first(self._streamer.next_logits(schedule, inputs, kept))

        # The library's own work uses the stream that fills the cache, so neither frees what the other still reads.
        with (
            self._causes.named(self._steps),
            self._ported.evaluation_mode(),
            self._device.preserved_random_state(),
            self._device.alongside(),
        ):
            self._device.seed(seed)
            found: Tensor = speak(
                self._ported, last_logits, self._device.torch_device, input_ids, attention_mask, options
            )
            self._device.synchronize()  # before another stream may reuse memory of this one
        return found

    @one_at_a_time
    def flush(self) -> None:
        """Apply pending updates, if any. Everything that reads the weights does so first."""
        self._flush()

    # Weights and checkpoints -----------------------------------------------------------------------------------------

    @one_at_a_time
    def master_weights(self) -> dict[str, Tensor]:
        """Parameter name -> a copy of its float32 master, in its shape, pending updates applied.

        Works even if an interrupted step has updated only some units (see `applied_updates`); all else refuses that.
        """
        self._flush()
        return {name: self._store.master(name) for name in self._store.names()}

    @one_at_a_time
    def master(self, name: str) -> Tensor:
        """A copy of one parameter's float32 master, in its shape, pending updates applied. Raises `ModelError` for an
        unknown name."""
        refuse_unknown(name, self.structure, "master")
        self._flush()
        return self._store.master(name)

    @one_at_a_time
    def weight_view(self, name: str) -> Tensor | None:
        """A view of one parameter in host memory, in its shape, pending updates applied: float32, or in bf16 the
        bfloat16 weight that streams. Training changes it, and writing to it changes the weight.

        `None` if the policy places it elsewhere. The view is valid until another policy is adopted.
        """
        refuse_unknown(name, self.structure, "weight_view")
        self._flush()
        return self._store.view(name)

    @one_at_a_time
    def fill(self, source: Source, progress: Progress | None = None) -> None:
        """Set every parameter from a source, keeping optimizer and counters. For code that constructs engines."""
        self._fill(source, progress)

    @one_at_a_time
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set some parameters, name -> value in the parameter's shape, keeping optimizer and counters.

        Raises `ModelError`, before any is set, for an unknown name or a wrong shape.
        """
        refuse_other_shapes(weights, self.structure)
        self._settle()
        self._saver.wait()
        self._causes.weights_replaced()
        for name in self._store.names():  # unit by unit
            if name in weights:
                self._store.write_master(name, weights[name])
        self._store.settle()

    @one_at_a_time
    def save_pretrained(self, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
        """Write a Hugging Face folder, streamed unit by unit; it appears complete or not at all.

        precision: `fp32`, the exact masters, or `bf16`, rounded; `None` (default) is `fp32`, or `bf16` for a model that
        was published quantized. facts: name -> value, for the model card's table on training. write_more: called with
        the folder before it appears, to add a tokenizer, say. progress: called with (done, total) bytes. Returns the
        folder's absolute path. Raises `ExportError` if it cannot be written; a model already there then stays.
        """
        self._settle()
        try:
            return export_together(self.world, self._ported, self._store, folder, **options)
        finally:
            self._store.settle()

    def save_adapter(self, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
        """As `save_pretrained`, which writes an adapter as `peft` does; raises `ModelError` if there is none."""
        if self._ported.adapter is None:
            raise ModelError("has no adapter", where=self.structure.name, fix="call save_pretrained")
        return self.save_pretrained(folder, **options)

    @one_at_a_time
    def save(
        self,
        folder: str | Path,
        training: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        score: float | None = None,
        write_more: Callable[[Path], object] | None = None,
        then: Callable[[Path], object] | None = None,
    ) -> Save:
        """Start writing the checkpoint `folder/step-...`, and return; steps may follow while it is written.

        It holds the state as it is now, bit for bit: an update waits for its unit to be written. Only one save runs at
        a time. `Save.wait` returns the folder, or raises what failed; training continues regardless.

        training: further plain values to keep, such as the position in the data (`Checkpoint.training["run"]` returns
        them). step: the number in the name, by default `steps`. score, write_more: see `checkpoint.write_checkpoint`.
        then: called with the folder once complete, on the thread that wrote it.
        Raises `ExportError`, and `DoesNotFit` without memory for the largest unit in float32.
        """
        self._settle()
        seed, base = (
            self._streamer.context.seed,
            None if self._ported.adapter is None else self._store.frozen_checksum(),
        )
        names = self._pool.units
        kept = as_saved(self._sink, self.numerics, self.policy, self._steps, seed, names, training or {}, base)
        number = self._steps if step is None else step
        return self._saver.begin(folder, number, self.policy, kept, score, write_more, then)

    @one_at_a_time
    def restore(self, checkpoint: Checkpoint | str | Path) -> None:
        """Load weights, optimizer state and step count from a checkpoint of this model. Pending updates are dropped.

        checkpoint: as for `from_checkpoint`. Raises `CheckpointError`, before changing anything, if it is damaged or of
        another model. After any other error, restore another checkpoint.
        """
        checkpoint = checked(checkpoint, Checkpoint | str | Path, CheckpointError, "restore")
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        source = weights_in(checkpoint, self._ported)
        self._saver.wait()
        refuse_other_base(checkpoint, self._store.frozen_checksum)
        self._sink.restore(0)
        self._fill(source)
        self._take_up(checkpoint, "refuse")

    # Policy ----------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy of the last step that was prepared or run."""
        return self._schedules.policy

    @one_at_a_time
    def adopt(self, policy: Policy) -> None:
        """Use another policy from now on, without changing any number. Pending updates are applied first.

        State moves to the tiers that the policy names. Raises `PlanError` for a policy that cannot be used, or that
        changes `update` or `transfer`, and `DoesNotFit` or `DiskError` if a tier refuses; the old policy then stays.
        """
        checked(policy, Policy, PlanError, "policy")
        self._settle()
        self._saver.wait()
        before, fits, saves = self.policy, self._schedules.fits_activations, self._saver.is_reserved
        self._take(policy)
        try:
            if saves:
                self._saver.reserve()  # before the next schedule's slots, which may take all memory
            self._schedules.get(self._main_kind, Work((1,)))
        except MegaTrainError:
            self._take(before, fits_activations=fits)
            raise

    def _take(self, policy: Policy, *, fits_activations: bool = False) -> None:
        self._schedules.adopt(policy, fits_activations=fits_activations)
        self._streamer.context.policy = policy
        self._sink.adopt(policy)

    @one_at_a_time
    def prepare(self, work: Work) -> Schedule:
        """Choose a plan for this work, build and check its schedule (a forward pass's if nothing trains), and allocate
        its memory, without running anything. Returns the schedule of a step without pending updates."""
        return self._schedules.get(self._main_kind, checked(work, Work, PlanError, "work"))

    # What it is, and what it takes -----------------------------------------------------------------------------------

    @property
    def generation_config(self) -> Any:
        """The `GenerationConfig` whose defaults `generate` uses: the model's own; may be changed."""
        return self._ported.skeleton.generation_config

    @property
    def config(self) -> Any:
        """The model's transformers config, as it is saved; changing what shapes the computation has no effect."""
        return self._ported.skeleton.config

    @property
    def optimizer(self) -> AdamW:
        """The hyperparameters of the next step; change them with `set_optimizer`."""
        return self._sink.optimizer

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped."""
        return self._sink.max_grad_norm

    def memory_table(self) -> dict[tuple[str, str], int]:
        """(tier, use) -> bytes held now, without activations inside layers."""
        return self._pool.ledger.table()

    def host_nbytes_left(self) -> int:
        """Bytes of host memory that are free now, within the limit, if any."""
        free, budget = available_host_nbytes(), self.limits.host_nbytes
        return free if budget is None else max(0, min(free, budget - self._pool.ledger.nbytes_in_host_memory))

    @property
    def timeline(self) -> Timeline | None:
        """Start and end of each op of the last call, in seconds, if recorded (`record_timeline`)."""
        return self._streamer.timeline

    def applied_updates(self) -> dict[str, int]:
        """Unit name -> optimizer updates applied to its state; pending ones are not counted."""
        return {unit.name: count for unit, count in zip(self.structure.units, self._sink.applied, strict=True)}

    @property
    def spec(self) -> ModelSpec:
        """`structure`, plus the memory profiles of its layers, which are measured on first use."""
        return self._ported.spec

    def step_flops(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Model FLOPs of a step over these micro-batches and those of all other ranks.

        Masked positions do not count, packed sequences attend only to themselves, and only targets need the head.
        """
        batches = list(micro_batches)
        sequences, targets = [n for each in batches for n in sequences_of(each)], sum(map(count_targets, batches))
        return sum(self.world.exchange("operations", step_flops(self.spec, sequences, targets)))

    @one_at_a_time
    def peak_flops(self) -> float:
        """FLOPs per second of large matrix products, measured once, summed over the devices of all ranks."""
        return sum(
            self.world.exchange("operations per second", matmul_flops(self._device, self._streamer.context.dtype))
        )

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Write the ops of the next steps as a trace for Perfetto, without the next one, which warms up."""
        self._trace = Trace(path, steps)

    def run_ops_in(self, region: Callable[[], AbstractContextManager[object]]) -> None:
        """Run every schedule inside the context manager that `region()` returns (a signal handler, say).

        An exception that it raises interrupts the step, which then counts as not started; with clipping, the same call
        repeats it bit for bit."""
        self._streamer.region = region

    @property
    def router_aux_loss_coef(self) -> float | None:
        """Coefficient of the router auxiliary loss; `None` if the model's config does not enable it."""
        return self._ported.balance_coefficient

    @property
    def rounded(self) -> list[str]:
        """Frozen parameters whose source values were not bfloat16: in bf16 they are held, and written, rounded to the
        bfloat16 values used in computing. Empty in fp32."""
        return sorted(self._store.rounded)

    @property
    def disk(self) -> Disk | None:
        """The disk tier, if there are folders for it."""
        return self._disk

    @property
    def steps(self) -> int:
        """Steps done, including those before a restored checkpoint."""
        return self._steps

    @property
    def saver(self) -> Saver:
        """Writes checkpoints; gives access to reserving its memory and to its progress."""
        return self._saver

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """(op, stream, seconds so far) of each running op, and seconds since any began or ended; on any thread."""
        return self._streamer.under_way()

    def __repr__(self) -> str:
        """One line: what it trains, how, its progress and its memory; may be called at any time, on any thread."""
        numel, trained = self.structure.numel, self.structure.trained_numel
        frozen = "" if trained == numel else f", {trained:,} trained"
        held = {tier: self._pool.ledger.nbytes(tier) for tier, _ in self.memory_table()}
        memory = ", ".join(f"{amount(nbytes)} on the {tier}" for tier, nbytes in held.items() if nbytes)
        state = "closed" if self._turn.is_closed else f"{self._steps:,} steps, {memory}"
        how = f"{self.numerics.precision} on {self._device.name}"
        return f"<Engine of {self.structure.name}: {numel:,} parameters{frozen}, {how}, {state}>"

    def close(self) -> None:
        """Stop the workers and free the memory; pending updates are dropped with the weights. In a forked child this
        does nothing: the engine's resources belong to the process that made it."""
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _main_kind(self) -> Kind:
        """The kind of run that repeats: steps, or forward passes if every parameter is frozen."""
        return "step" if self.structure.trained_numel else "forward"

    @property
    def _written_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.written_nbytes

    def _measure(
        self, micro_batches: Iterable[MicroBatch], loss_fn: LossFn | None, router_weights: Sequence[float] | None = None
    ) -> StepResult:
        forward = partial(self._forward, self._checked(micro_batches, loss_fn, router_weights), 0)
        with self._ported.evaluation_mode(), self._causes.named(self._steps, forward):
            return forward()

    def _forward(self, asked: StepInput, number: int) -> StepResult:
        self._settle()
        return self._streamer.run_schedule(self._schedules.get("forward", asked.work), asked, None, number)

    def _flush(self) -> None:
        if self._sink.pending:
            self._streamer.run_schedule(self._schedules.get("flush", Work((1,))), StepInput(), self._sink)

    def _settle(self) -> None:
        """Apply pending updates, and refuse a state in which some units are ahead of others."""
        self._flush()
        self._sink.refuse_torn()

    def _fill(self, source: Fills, progress: Progress | None = None) -> None:
        self._saver.wait()
        self._causes.weights_replaced()
        fill(source, self._store, self._store.names_by_unit(read=not self._ported.lies_in(source)), progress)

    def _take_up(self, checkpoint: Checkpoint, new: NewMoments) -> None:
        """Load moments and counters of a checkpoint whose masters are already loaded."""
        facts = facts_in(checkpoint)
        refuse_other_base(checkpoint, self._store.frozen_checksum)
        read_moments(checkpoint, self._store, new)
        self._sink.restore(facts["updates"], missed_in(checkpoint, self.structure))
        self._steps, self._streamer.context.seed = facts["steps"], facts.get("seed", self._streamer.context.seed)
        self._saver.goes_on_from(checkpoint.folder)


def unverified(model: nn.Module, device: str, numerics: Numerics, policy: Policy) -> Engine:
    """An engine for the check itself, hence without a check of its own. Each rank checks alone."""
    source = ModelSource(model)  # type: ignore[arg-type]  # a model of transformers
    return Engine.from_source(source, device=device, numerics=numerics, policy=policy, verify=False, world=ALONE)


__all__ = ["Engine", "StepOutput", "unverified"]
