"""`Engine` trains a Hugging Face model by streaming its layers. The stable Python interface of MegaTrain.

It is the page that a user reads: how an engine is made, what it computes, and how it is saved. What it consists of is
in `parts`, single weights are in `weights`, and its memory and timing in `diagnostics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from megatrain.checkpoint.export import ExportOptions
from megatrain.checkpoint.folder import open_checkpoint, open_verifying_on_load, refuse_damaged_weights
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.save import CheckpointFacts
from megatrain.device import Device, open_device, timed
from megatrain.dist import ALONE
from megatrain.engine import KeepLogProbs, LossFn, MicroBatch, StepResult, check_inputs
from megatrain.engine.batch import check_arguments, check_mapping, model_entries
from megatrain.errors import CheckpointError, ConfigError, MegaTrainError, PlanError
from megatrain.formatting import amount
from megatrain.model import (
    FreshSource,
    ModelSource,
    PortedModel,
    PretrainedSource,
    Progress,
    Source,
    base_of,
    freeze_parameters,
    pretrained_source,
    refuse_other_kinds,
    speak,
)
from megatrain.model.base_below_adapter import without_adapter
from megatrain.model.pretrained import look_first
from megatrain.model.skeleton import on_the_cpu
from megatrain.optim import Optimizer
from megatrain.spec import ModelSpec, Numerics, Policy, Precision
from megatrain.spec.validate_fields import checked
from megatrain.train.async_save import Save
from megatrain.train.diagnostics import Diagnostics
from megatrain.train.events import StepOutput
from megatrain.train.one_call_at_a_time import TakesTurns, one_at_a_time
from megatrain.train.optimizer import GradientCollector
from megatrain.train.options import (
    EngineOptions,
    RunOptions,
    Seed,
    SourceInUnits,
    checked_options,
    is_alone,
    numerics_of,
    ported_of,
    refuse_other_groups,
    world_of,
)
from megatrain.train.parity import NOT_ASKED, Checked, short_check
from megatrain.train.parts import Parts, work_of
from megatrain.train.restore import (
    BASE,
    FROZEN,
    NewMoments,
    as_saved,
    frozen_in,
    optimizer_in,
    options_in,
    refuse_other_base,
    refuse_other_state,
    source_in,
    weights_in,
)
from megatrain.train.save_from_ranks import export_together
from megatrain.train.weights import Weights


class Engine(TakesTurns, AbstractContextManager["Engine"]):
    """Trains a causal language model whose state is in host memory. Construct it with `Engine.from_model` and the
    like."""

    def __init__(self, ported: PortedModel, device: Device, options: EngineOptions) -> None:
        """Allocates memory without filling it."""
        self.parts = parts = Parts(ported, device, options)
        self._turn = parts.turn
        self.structure: ModelSpec = parts.structure
        """The units and parameters of the model."""
        self.numerics, self.limits, self.world = parts.numerics, parts.limits, parts.world
        self.config: Any = ported.skeleton.config
        """The model's transformers config, as it is saved; changing what shapes the computation has no effect."""
        self.generation_config: Any = ported.skeleton.generation_config
        """The `GenerationConfig` whose defaults `generate` uses: the model's own; may be changed."""
        self.weights, self.diagnostics, self.saver = Weights(parts), Diagnostics(parts), parts.saver
        self.steps = 0
        """Steps done, including those before a restored checkpoint."""
        self.checked = NOT_ASKED  # whether this architecture is known to be computed correctly

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        device: str | torch.device | Device = "cpu",
        precision: Precision | None = None,
        optimizer: Optimizer | None = None,
        max_grad_norm: float | None = 1.0,
        policy: Policy | Literal["auto"] = "auto",
        **options: Unpack[RunOptions],
    ) -> Engine:
        """An engine that starts from a copy of the weights of a Hugging Face causal language model.

        model: not changed, and not needed afterwards; its mode (`train()` or `eval()`) decides about dropout, and
        parameters without `requires_grad` are frozen: they need neither gradients nor optimizer state.
        device: `cpu`, `cuda:0`, `sim:SEED`, a `torch.device`, or an open device. precision: `bf16` (default) computes
        in bfloat16 with exact float32 masters; `fp32` does everything in float32. optimizer: default `AdamW()`.
        max_grad_norm: clip by the exact global norm; `None` disables clipping. policy: `auto`, or a `Policy` that
        agrees with the other arguments.

        Less often given, and by keyword only:
        seed: determines all randomness inside layers; default 0. disk: folders, on fast drives, for the state that the
        policy places there, or a `megatrain.memory.Disk`, which has options. limits: bytes of each tier that it may
        use; by default all that is free. verify: for an architecture not seen before, compare a small model of its kind
        with the stock code, and refuse one that is computed wrongly; default true. numerics: all that numbers depend
        on, including the precision. world: the ranks that train together, calling their engines alike; by default
        torchrun's processes, if anything trains.
        image_row: a micro-batch of one row with images, as large as any; the layers of the encoder that it goes through
        are then streamed like the model's other layers, where that is exact, and stay in the prologue otherwise.

        Raises `ModelError` for a model that cannot be streamed exactly, `PlanError` for a policy that contradicts
        the other arguments, `ConfigError` for an invalid argument, `RankError` if other ranks do not connect,
        `DoesNotFit` before anything is allocated, `DeviceError` for a missing device.
        """
        model = base_of(model)
        refuse_other_kinds(model)
        chosen: EngineOptions = {
            "device": device,
            "precision": precision,
            "optimizer": optimizer,
            "max_grad_norm": max_grad_norm,
            "policy": policy,
            **options,
        }
        return cls.from_source(ModelSource(model), **chosen)  # type: ignore[arg-type]  # no other kind is left

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
        `from_model`, `ModelError` for files that are missing, damaged or of another model, and `DamagedCheckpoint`
        for a checkpoint whose weights have changed. Tensors of the files that the model does not read are copied by
        `save_pretrained` and `save`.
        """
        options = checked_options(options)
        how: Any = {"attention": attention, "trust_remote_code": trust_remote_code}
        refuse_damaged_weights(source)
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
        cls, source: Source | SourceInUnits, *, progress: Progress | None = None, **options: Unpack[EngineOptions]
    ) -> Engine:
        """An engine for any source of structure and weights; options and errors as for `from_model`.

        source: a `SourceInUnits` if its model has already been split into units, in the same precision.
        """
        options = checked_options(options)
        source, ported = (source.source, source.ported) if isinstance(source, SourceInUnits) else (source, None)
        device = options.get("device", "cpu")
        opened = device if isinstance(device, Device) else open_device(device)
        try:
            options["world"] = world_of(options, source.model, opened)
            checked_now = _checked(source.model, numerics_of(options)) if options.get("verify", True) else NOT_ASKED
            engine = cls(ported or ported_of(source, options), opened, options)
            engine.checked = checked_now
        except BaseException:
            if opened is not device:
                opened.close()
            raise
        try:
            engine.weights.fill(source, progress)
            engine.optimizer.warm_up()
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
        source: Source | SourceInUnits | None = None,
        new: NewMoments = "refuse",
        attention: str = "auto",
        trust_remote_code: bool = False,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine that continues where `save` was called: bit-exact, whatever the policy, tiers and device memory.

        checkpoint: a folder `step-...`, which is checked as it loads, one of another trainer, or an open one. Frozen
        parameters stay frozen; optimizer, numerics and clipping are the checkpoint's unless given; device and policy
        are as for `from_model`. source: the checkpoint as a source, frozen as wanted, if there is one, or another
        trainer's model. new: whether parameters that did not train before are refused, or start with zero moments.
        Raises `DamagedCheckpoint`, `CheckpointError`, and what `from_pretrained` raises.
        """
        options = checked_options(options)
        opens = (
            open_verifying_on_load if is_alone(options) else open_checkpoint
        )  # or ranks would see damage at different times
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else opens(checkpoint)
        options = checked_options({**options, **options_in(opened, options)})  # type: ignore[typeddict-item]
        given = source.source if isinstance(source, SourceInUnits) else source
        read = source_in(opened, given, attention=attention, trust_remote_code=trust_remote_code)
        if given is None:
            freeze_parameters(read.model, frozen_in(opened, (name for name, _ in read.model.named_parameters())))
            source = SourceInUnits(read, ported_of(read, options, of_checkpoint=True))
        else:
            source = SourceInUnits(read, source.ported) if isinstance(source, SourceInUnits) else read
        if "optimizer" not in options:
            options["optimizer"] = optimizer_in(opened)
        if isinstance(read, PretrainedSource):
            look_first(read, opened.verify)
        engine = cls.from_source(source, progress=progress, **options)
        try:
            engine.steps = engine.parts.take_up(opened, new)
            opened.verify_rest()
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
        parts = self.parts
        asked = parts.step_input(micro_batches, loss_fn, router_weights, trains=True)
        if parts.optimizer.is_interrupted:
            parts.flush()  # updates left by an interrupted step
        schedule = parts.schedules.get("pending step" if parts.optimizer.pending else "step", asked.work)
        parts.optimizer.begin(self.optimizer.lr if lr is None else lr)
        parts.device.stalled_seconds()
        before = 0 if parts.disk is None else parts.disk.written_nbytes
        once_more = partial(parts.forward, asked, self.steps)
        is_timed = timed(parts.device) if self.diagnostics.wants_times else nullcontext()
        with parts.causes.named(self.steps, once_more), is_timed:
            try:
                state = parts.streamer.begin(schedule, asked, parts.optimizer, self.steps)
                with parts.streamer.running(state) as run:
                    run()
                result = parts.streamer.result(state)
            except BaseException as error:
                if parts.optimizer.at_rest():
                    self.steps += 1
                    _say_it_is_applied(error)
                raise
            parts.optimizer.at_rest()
            norm = parts.optimizer.finish()
        self.steps += 1
        self.diagnostics.step_done()
        written = 0 if parts.disk is None else parts.disk.written_nbytes - before
        written = sum(self.world.exchange("bytes written", written)) if parts.disk else 0
        stalled, metrics = parts.device.stalled_seconds(), dict(result.metrics)
        return StepOutput(result.loss, norm, result.tokens, stalled, written, metrics, result.by_micro_batch)

    @property
    def optimizer(self) -> Optimizer:
        """The hyperparameters of the next step; change them with `set_optimizer`."""
        return self.parts.optimizer.algorithm

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped; `None` if they are not."""
        return self.parts.optimizer.max_grad_norm

    @one_at_a_time
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use these hyperparameters from the next step on; pending updates keep those of their own step.

        Raises `ConfigError` for another kind of optimizer, or if the sets of parameters that decay, or share a learning
        rate, would change.
        """
        refuse_other_groups(self.optimizer, optimizer)
        self.parts.optimizer.algorithm = optimizer

    @one_at_a_time
    def gradients(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> dict[str, Tensor]:
        """Parameter name -> float32 gradient of the step's loss, in the parameter's shape. Nothing is updated."""
        parts = self.parts
        asked = parts.step_input(micro_batches, loss_fn, router_weights, trains=True)
        parts.settle()
        collector = GradientCollector(self.structure, parts.optimizer.before_update, parts.store)
        schedule = parts.schedules.get("step", asked.work)
        with parts.causes.named(self.steps, partial(parts.forward, asked, self.steps)):
            parts.streamer.run_schedule(schedule, asked, collector, self.steps)
        return collector.finish()

    @one_at_a_time
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Mean loss over all target tokens of the micro-batches, without dropout. Nothing is updated."""
        return self.parts.measure(self.parts.step_input(micro_batches), self.steps).loss

    @one_at_a_time
    def measure(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> StepResult:
        """As `evaluate`, for any loss, with the target tokens and what the loss function reports; see `step`."""
        return self.parts.measure(self.parts.step_input(micro_batches, loss_fn, router_weights), self.steps)

    @one_at_a_time
    def log_probs(self, micro_batches: Iterable[MicroBatch], *, of_base: bool = False) -> list[Tensor]:
        """The log-probability of each label given the tokens before it: float32[batch, length] per micro-batch, on
        the CPU, at the labels' positions, 0 without a target. of_base: without the adapter; raises `ModelError` if
        the base is not there as it was."""
        keeps = KeepLogProbs()
        with without_adapter(self.parts.ported) if of_base else nullcontext():
            self.parts.measure(self.parts.step_input(micro_batches, keeps), self.steps)
        return keeps.kept

    @one_at_a_time
    def logits(self, inputs: MicroBatch) -> Tensor:
        """All logits, float32[batch, length, vocabulary] on the device, for arguments of the model's forward.

        They are not chunked, so use few and short rows. Without dropout; nothing is updated.
        """
        check_mapping(inputs, "logits")
        check_inputs(self.structure, {"labels": inputs.get("input_ids"), **inputs}, "logits")
        check_arguments(self.parts.ported.arguments, inputs, (), "logits")
        self.parts.settle()
        schedule = self.parts.schedules.get("forward", work_of(inputs))
        with self.parts.ported.evaluation_mode():
            return self.parts.streamer.next_logits(schedule, model_entries(inputs), logits_to_keep=0)

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
        self.parts.settle()

        def last_logits(inputs: Mapping[str, Any], kept: int) -> Tensor:
            schedule = self.parts.schedules.get("forward", work_of(inputs))
            return self.world.of_first(self.parts.streamer.next_logits(schedule, inputs, kept))

        # The library's own work uses the stream that fills the cache, so neither frees what the other still reads.
        with (
            self.parts.causes.named(self.steps),
            self.parts.ported.evaluation_mode(),
            self.parts.device.preserved_random_state(),
            self.parts.device.alongside(),
        ):
            self.parts.device.seed(seed)
            token_ids: Tensor = speak(
                self.parts.ported, last_logits, self.parts.device.torch_device, input_ids, attention_mask, options
            )
            self.parts.device.synchronize()  # before another stream may reuse memory of this one
        return token_ids

    # Weights and checkpoints -----------------------------------------------------------------------------------------

    @one_at_a_time
    def master_weights(self) -> dict[str, Tensor]:
        """Parameter name -> a copy of its float32 master, in its shape, pending updates applied.

        Works even if an interrupted step has updated only some units (see `applied_updates`); all else refuses that.
        """
        self.parts.flush()
        return {name: self.parts.store.master(name) for name in self.parts.store.names()}

    @one_at_a_time
    def save_pretrained(self, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
        """Write a Hugging Face folder, streamed unit by unit; it appears complete or not at all. An adapter is written
        as `peft` does, without its base.

        precision: `fp32`, the exact masters, or `bf16`, rounded; `None` (default) is `fp32`, or `bf16` for a model that
        was published quantized. facts: name -> value, for the model card's table on training. write_more: called with
        the folder before it appears, to add a tokenizer, say. progress: called with (done, total) bytes. Returns the
        folder's absolute path. Raises `ExportError` if it cannot be written; a model already there then stays.
        """
        self.parts.settle()
        return export_together(self.world, self.parts.ported, self.parts.store, folder, **options)

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
        a time. `Save.wait` returns the folder, or raises what failed; training continues regardless. The end of the
        engine's `with` block waits too; `close` alone does not.

        training: further plain values to keep, such as the position in the data (`Checkpoint.training["run"]` returns
        them). step: the number in the name, by default `steps`. score, write_more: see `CheckpointFacts`.
        then: called with the folder once complete, on the thread that wrote it.
        Raises `ExportError`, and `DoesNotFit` without memory for a piece of the state in float32.
        """
        self.parts.settle()
        frozen, seed = dict[str, str](), self.parts.streamer.context.seed
        if self.parts.ported.adapter is not None:
            frozen = {BASE: self.parts.store.frozen_checksum()}
        elif self.structure.trained_numel < self.structure.numel:
            frozen = {FROZEN: self.parts.store.frozen_checksum()}
        kept = as_saved(self.parts.optimizer, self.numerics, self.steps, seed, training or {}, frozen)
        facts = CheckpointFacts(self.steps if step is None else step, kept, score, write_more)
        return self.saver.begin(folder, facts, self.policy, then)

    @one_at_a_time
    def restore(self, checkpoint: Checkpoint | str | Path) -> None:
        """Load weights, optimizer state and step count from a checkpoint of this model. Pending updates are dropped.

        checkpoint: as for `from_checkpoint`. Raises `CheckpointError`, before changing anything, if it is damaged or of
        another model. After any other error, only restoring a checkpoint is possible; all else that trains, evaluates
        or saves is refused.
        """
        checkpoint = checked(checkpoint, Checkpoint | str | Path, CheckpointError, "restore")
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        checkpoint.verify_rest()
        source = weights_in(checkpoint, self.parts.ported)
        self.saver.wait()
        refuse_other_base(checkpoint, self.parts.store.frozen_checksum)
        refuse_other_state(checkpoint, self.structure, self.optimizer, "refuse")
        self.parts.optimizer.restore(None)
        self.parts.fill(source)
        self.steps = self.parts.take_up(checkpoint, "refuse")

    # Policy ----------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy of the last step that was prepared or run."""
        return self.parts.schedules.policy

    @one_at_a_time
    def adopt(self, policy: Policy) -> None:
        """Use another policy from now on, without changing any number. Pending updates are applied first.

        State moves to the tiers that the policy names. Raises `PlanError` for a policy that cannot be used, or that
        changes `update` or `transfer`, and `DoesNotFit` or `DiskError` if a tier refuses; the old policy then stays.
        """
        checked(policy, Policy, PlanError, "policy")
        self.parts.settle()
        self.saver.wait()
        self.parts.adopt(policy)

    # The object ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """One line: what it trains, how, its progress and its memory; may be called at any time, on any thread."""
        numel, trained = self.structure.numel, self.structure.trained_numel
        frozen = "" if trained == numel else f", {trained:,} trained"
        held = {tier: self.parts.pool.ledger.nbytes(tier) for tier, _ in self.diagnostics.memory_table()}
        memory = ", ".join(f"{amount(nbytes)} on the {tier}" for tier, nbytes in held.items() if nbytes)
        state = "closed" if self._turn.is_closed else f"{self.steps:,} steps, {memory}"
        how = f"{self.numerics.precision} on {self.parts.device.name}"
        return f"<Engine of {self.structure.name}: {numel:,} parameters{frozen}, {how}, {state}>"

    def close(self) -> None:
        """Stop the workers and free the memory; pending updates are dropped with the weights, and a save in progress is
        given up, unless a `with` block that makes the engine ends without an error. In a forked child this does
        nothing: the engine's resources belong to the process that made it."""
        self.parts.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the engine; without an error, once a save in progress is complete. Raises what failed in the last save,
        unless `Save.wait` has."""
        save = self.parts.saver.current
        try:
            if kind is None and save is not None and save.is_unreported:
                save.wait()
        finally:
            self.close()


def _say_it_is_applied(error: BaseException) -> None:
    """Add to the error of a step that failed once all units were updated that a repetition would update them again."""
    if isinstance(error, MegaTrainError):
        error.what += ", after the step had updated all weights"
        error.fix = "; ".join(filter(None, [error.fix, "do not repeat the step: the next one follows it"]))


def _checked(model: nn.Module, numerics: Numerics) -> Checked:
    return short_check(model, unverified, kernels=numerics.kernels)


def unverified(model: nn.Module, device: str, numerics: Numerics, policy: Policy) -> Engine:
    """An engine for the check itself, hence without a check of its own. Each rank checks alone."""
    source = ModelSource(model)  # type: ignore[arg-type]  # a model of transformers
    return Engine.from_source(source, device=device, numerics=numerics, policy=policy, verify=False, world=ALONE)


__all__ = ["Engine", "StepOutput", "unverified"]
