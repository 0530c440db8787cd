"""`Engine`: a Hugging Face model, streamed and trained. The stable Python interface of MegaTrain.

It puts together what the rooms below offer: a ported model, a device, the pool and store that hold the state, the
streamer that walks schedules, and the sink that updates. Schedules are built once per shape of work, checked, and
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from megatrain.checkpoint import Checkpoint, ExportOptions, open_checkpoint
from megatrain.device import Device, matmul_flops, open_device, timed
from megatrain.dist import ALONE, World
from megatrain.engine import (
    KeepLogProbs,
    LossFn,
    MicroBatch,
    StepResult,
    Streamer,
    check_inputs,
    count_targets,
    sequences_of,
)
from megatrain.engine.batch import check_arguments, check_mapping, for_model
from megatrain.errors import CheckpointError, ConfigError, DoesNotFit, ModelError, PlanError
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
from megatrain.optim import AdamW, warm_up
from megatrain.plan import available_host_nbytes, step_flops
from megatrain.plan.report import amount
from megatrain.schedule import Schedule, Timeline
from megatrain.spec import Limits, ModelSpec, Numerics, Policy, Precision, Work
from megatrain.spec.fields import checked
from megatrain.spec.layout import Ownership
from megatrain.train.async_save import Save, Saver
from megatrain.train.events import StepOutput
from megatrain.train.gathered_files import export_together
from megatrain.train.nonfinite_weights import NonfiniteWeights
from megatrain.train.one_call_at_a_time import Turn, one_at_a_time
from megatrain.train.optimizer_sink import GradientCollector, OptimizerSink
from megatrain.train.options import (
    EngineOptions,
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
    optimizer_in,
    read_moments,
    refuse_other_base,
    weights_in,
)
from megatrain.train.schedule_cache import Kind, Schedules, budgets
from megatrain.train.step_inputs import checked_micro_batches
from megatrain.train.timeline_file import Trace


class Engine:
    """Trains one causal language model whose state lives in host memory. Make it with `Engine.from_model`."""

    def __init__(self, ported: PortedModel, device: Device, options: EngineOptions) -> None:
        """Its memory is allocated, with nothing in it yet."""
        self.world = world = options.get("world") or ALONE
        ported.share(world.size)
        self.structure: ModelSpec = ported.structure
        self.optimizer, self.max_grad_norm = optimizer_of(options, self.structure), options.get("max_grad_norm", 1.0)
        self.numerics, self.limits = numerics_of(options), limits_of(options)
        policy, fits = policy_of(options, device, self.structure), options.get("policy", "auto") == "auto"
        self._ported, self._device, self._disk = ported, device, disk_of(options, policy)
        self._owns_device = device is not options.get("device", "cpu")
        ledger = Ledger(budgets(self.limits, device, self._disk), one_memory=policy.shares_memory)
        shared, names = SharedMemory.of(self.structure, self.numerics, policy, device, world), self.structure.names
        self._pool = Pool(device, ledger, self._disk, names, policy.transfer, shared, files_of(ported))
        owned = Ownership(world.rank, max(1, policy.shard_nbytes // self.numerics.weight_nbytes))
        self._store = Store(self.structure, self.numerics, policy, self._pool, owned, world.together)
        self._schedules = Schedules(ported, self._store, self.numerics, policy, device, world, fits_activations=fits)
        how = self.structure, self.numerics, policy, self.optimizer, self.max_grad_norm, device
        try:
            self._schedules.get(self._main_kind, Work((1,)))
            self._sink = OptimizerSink(*how, owned, world)
            self._streamer = Streamer(ported, device, self._pool, self.numerics, policy, options.get("seed", 0), world)
        except BaseException:
            self._pool.release()
            raise
        self._saver = Saver(ported, self._store, world.aside())
        self._sink.before_update = self._saver.before_update
        self._weights = NonfiniteWeights(self._store, world)
        self._steps, self._turn = 0, Turn()
        self.checked = NOT_ASKED  # whether this architecture is known to be computed right
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
        world: World | None = None,
    ) -> Engine:
        """An engine that starts from a copy of the weights of a Hugging Face causal language model.

        model: left as it is, and not needed afterwards; its mode (`train()` or `eval()`) decides about dropout, and
        parameters that need no gradient are frozen: they cost neither gradients nor optimizer state.
        device: `cpu`, `cuda:0`, `sim:SEED`, a `torch.device`, or an open device. precision: `bf16`, the usual, computes
        in bfloat16 and keeps exact float32 masters; `fp32` does everything in float32. optimizer: its defaults if not
        given. max_grad_norm: clip by the exact global norm, or `None` not to. policy: `auto`, or a `Policy` that
        agrees with the arguments. seed: decides all randomness inside layers. verify: at the
        first meeting of an architecture, compare a small model of its kind with the stock code, and refuse to go on
        with one that is computed wrong. disk: folders, on quick drives, for the state that the policy puts there.
        limits: what it may take of each tier; what is open is all that there is. numerics: all that numbers depend on,
        the precision among it. world: the ranks that train it together, each with an engine that is called alike; the
        processes that torchrun has started, if it is not given and anything trains.

        Raises `ModelError` for a model that cannot be streamed exactly, `PlanError` for a policy that contradicts
        the other arguments, `ConfigError` for an argument that is none, `RankError` where other ranks do not come,
        `DoesNotFit` before anything is allocated, `DeviceError` for an absent device.
        """
        model = base_of(model)
        refuse_other_kinds(model)
        options: EngineOptions = {"device": device, "precision": precision, "numerics": numerics, "policy": policy}
        options |= {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "limits": limits, "disk": disk}
        options = checked_options({**options, "seed": seed, "verify": verify, "world": world})
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
        adapter: Any = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """An engine over a local folder or a hub name, whose files stream straight into the store, unit by unit.

        attention: kernel by its Hugging Face name, or `auto`, the library's choice for the model. freeze: glob
        patterns of parameter names. adapter: a `PeftConfig`, or the folder of an adapter to go on from; then it alone
        trains. A source that is such a folder is its base with it. progress: called with (done, total). options: as for
        `from_model`. Raises what `from_model` raises, and `ModelError` for files that are missing, torn or of another
        model.
        """
        options = checked_options(options)
        seed = options.get("seed", 0)
        pretrained = pretrained_source(source, adapter, seed, attention=attention, trust_remote_code=trust_remote_code)
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
            source = pretrained_source(opened.folder, attention=attention, trust_remote_code=trust_remote_code)
            freeze_parameters(source.model, frozen_in(opened, (name for name, _ in source.model.named_parameters())))
            ported = ported_of(source, options, of_checkpoint=True)
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

        micro_batches: a list, or anything that gives them one by one. Each holds `input_ids` and `labels`, int64[batch,
        length] (labels as Hugging Face has them: -100 is no target, shifted inside), and whatever else the model's
        forward reads, such as `attention_mask`. `lr` replaces the optimizer's for this step; `learning_rates` follow in
        proportion. `loss_fn` replaces cross-entropy: see `megatrain.losses`, where full logits never exist either. A
        router auxiliary loss that the model's config asks for counts by each micro-batch's share of the target tokens,
        or by `router_weights`, one for each micro-batch.

        Raises `BatchError` for an unusable micro-batch, or an entry that nothing reads, and `NonFinite` for a loss or
        gradient that is not finite; the step is then not applied (without clipping, units whose gradient is finite
        may have been: the error names them). With clipping, updates are applied during the next step's forward;
        everything that reads the weights applies them first.
        """
        batches, work = self._checked(micro_batches, loss_fn, router_weights, trains=True)
        if self._sink.is_interrupted:
            self._flush()  # what an interrupted step has left
        schedule = self._schedules.get("pending step" if self._sink.pending else "step", work)
        self._sink.begin(self.optimizer.lr if lr is None else lr)
        self._device.stalled_seconds()
        before = self._written_nbytes
        wants_times = self.record_timeline or self._trace is not None
        given = schedule, batches, self._sink, self._steps, loss_fn, router_weights
        with self._weights.blamed(self._steps), timed(self._device) if wants_times else nullcontext():
            try:
                result = self._streamer.run_schedule(*given)
            finally:
                self._sink.at_rest()
            norm = self._sink.finish()
        self._steps += 1
        trace, timeline = self._trace, self._streamer.timeline
        if trace is not None and timeline is not None and trace.add(timeline):
            self._trace = None
        written = sum(self.world.exchange("bytes written", self._written_nbytes - before)) if self._disk else 0
        found = dict(result.metrics), result.by_micro_batch
        return StepOutput(result.loss, norm, result.tokens, self._device.stalled_seconds(), written, *found)

    @one_at_a_time
    def set_optimizer(self, optimizer: AdamW) -> None:
        """Train with these hyperparameters from the next step on; what is pending keeps those of its own step.

        Raises `ConfigError` where other parameters would decay, or share a learning rate, than before.
        """
        refuse_other_groups(self.optimizer, optimizer)
        self.optimizer = self._sink.optimizer = optimizer

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
        collector = GradientCollector(self.structure, self._sink.before_update, self._store)
        schedule = self._schedules.get("step", work)
        with self._weights.blamed(self._steps):
            self._streamer.run_schedule(schedule, batches, collector, self._steps, loss_fn, router_weights)
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
        """The log-probability of each label, given the tokens before it: float32[batch, length] per micro-batch, on
        the cpu, at the places of the labels, and 0 where there is no target; of_base: without the adapter."""
        keeps = KeepLogProbs()
        with self._ported.without_adapter() if of_base else nullcontext():
            self._measure(micro_batches, keeps)
        return keeps.kept

    @one_at_a_time
    def logits(self, inputs: MicroBatch) -> Tensor:
        """All logits, float32[batch, length, vocabulary] on the device, for what the model's forward takes.

        These are whole, so this is for few and short rows. Without dropout; nothing is updated.
        """
        check_mapping(inputs, "logits")
        check_inputs(self.structure, {"labels": inputs.get("input_ids"), **inputs}, "logits")
        check_arguments(self._ported.arguments, inputs, (), "logits")
        self._settle()
        schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
        with self._ported.evaluation_mode():
            return self._streamer.next_logits(schedule, for_model(inputs), kept=0)

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
        check_inputs(self.structure, {"input_ids": input_ids, "labels": input_ids}, "generate")
        seed = checked(seed, Seed, ConfigError, "seed")
        self._settle()

        def last_logits(inputs: Mapping[str, Any], kept: int) -> Tensor:
            schedule = self._schedules.get("forward", Work((inputs["input_ids"].numel(),)))
            return self.world.of_first(self._streamer.next_logits(schedule, inputs, kept))

        # The library's own work runs on the stream that fills the cache, so neither frees what the other still reads.
        with (
            self._weights.blamed(self._steps),
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

    @one_at_a_time
    def flush(self) -> None:
        """Apply the updates that are pending, if any. Everything that reads the weights does that first."""
        self._flush()

    # Weights and checkpoints -----------------------------------------------------------------------------------------

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
    def fill(self, source: Source, progress: Progress | None = None) -> None:
        """Set every parameter from a source; optimizer and counters stay. For whoever makes an engine."""
        self._fill(source, progress)

    @one_at_a_time
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set some parameters, name -> value in the parameter's shape; optimizer and counters stay.

        Raises `ModelError`, before any is set, for a name or a shape that is not the model's.
        """
        shapes = {param.name: param.shape for unit in self.structure.units for param in unit.params}
        for name, value in weights.items():
            if tuple(value.shape) != shapes.get(name):
                what = f"has no parameter {name} of shape {list(value.shape)}"
                raise ModelError(what, where=f"model {self.structure.name}")
        self._settle()
        self._saver.wait()
        for name in self._store.names():  # unit by unit
            if name in weights:
                self._store.write_master(name, weights[name])
        self._store.settle()

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
            return export_together(self.world, self._ported, self._store, folder, **options)
        finally:
            self._store.settle()

    def save_adapter(self, folder: str | Path, **options: Unpack[ExportOptions]) -> Path:
        """Write the adapter as `peft` does, so that `PeftModel.from_pretrained` loads it; where there is one,
        `save_pretrained` does the same. Raises `ModelError` where there is none."""
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
        """Begin to write the checkpoint `folder/step-...`, and return; steps may follow while it is written.

        It holds the state as it is now, bit for bit: an update waits for its unit to be written. One is under way at a
        time. `Save.wait` gives the folder; what fails is told there, and training goes on.

        training: what else to keep, the position in the data, say (plain values; `Checkpoint.training["run"]` gives it
        back). step: the number in the name, `steps` if not given. score, write_more: see `checkpoint.write_checkpoint`.
        then: called with the folder once it is whole, on the thread that wrote it.
        Raises `ExportError`, and `DoesNotFit` without memory for the largest unit in float32.
        """
        self._settle()
        seed, base = self._streamer.seed, None if self._ported.adapter is None else self._store.frozen_checksum()
        names = self._pool.units
        kept = as_saved(self._sink, self.numerics, self.policy, self._steps, seed, names, training or {}, base)
        number = self._steps if step is None else step
        return self._saver.begin(folder, number, self.policy, kept, score, write_more, then)

    @one_at_a_time
    def restore(self, checkpoint: Checkpoint | str | Path, *, trust_remote_code: bool = False) -> None:
        """Load weights, optimizer state and step count from a checkpoint of this model. Pending updates are dropped.

        checkpoint: a folder `step-...`, which is checked first, or an open one. Raises `CheckpointError`, before
        anything is changed, for one that is damaged or of another model. After another error, restore another one.
        """
        checkpoint = checked(checkpoint, Checkpoint | str | Path, CheckpointError, "restore")
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        source = weights_in(checkpoint, self._ported, trust_remote_code)
        self._saver.wait()
        refuse_other_base(checkpoint, self._store.frozen_checksum)
        self._sink.restore(0)
        self._fill(source)
        self._take_up(checkpoint, "refuse")

    # Policy ----------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """How the model is streamed, as chosen for the last step that was prepared or run."""
        return self._schedules.policy

    @one_at_a_time
    def adopt(self, policy: Policy) -> None:
        """Stream by another policy from now on; no number changes. What is pending is applied first.

        State moves to the tiers that the policy names. Raises `PlanError` for another time of updates or way over the
        bus, `DoesNotFit` and `DiskError` where a tier refuses; the state is whole then, and the old policy holds.
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

    # What it is, and what it takes -----------------------------------------------------------------------------------

    @property
    def generation_config(self) -> Any:
        """The library's `GenerationConfig` that `generate` starts from: the model's own, which may be changed."""
        return self._ported.skeleton.generation_config

    @property
    def config(self) -> Any:
        """The library's config of the model, as it is saved. What shapes the computation is fixed by now."""
        return self._ported.skeleton.config

    def memory_table(self) -> dict[tuple[str, str], int]:
        """(tier, use) -> bytes held now, activations inside layers not counted."""
        return self._pool.ledger.table()

    def host_nbytes_left(self) -> int:
        """Bytes of host memory that are free now, within its limit where there is one."""
        free, budget = available_host_nbytes(), self.limits.host_nbytes
        if budget is None:
            return free
        ledger = self._pool.ledger
        held = ledger.nbytes("host") + (ledger.nbytes("device") if ledger.one_memory else 0)
        return max(0, min(free, budget - held))

    @property
    def timeline(self) -> Timeline | None:
        """When each op of the last call began and ended, in seconds, where it was measured (`record_timeline`)."""
        return self._streamer.timeline

    def applied_updates(self) -> dict[str, int]:
        """Unit name -> optimizer updates that its state in host memory has had; pending ones are not counted."""
        return {unit.name: count for unit, count in zip(self.structure.units, self._sink.applied, strict=True)}

    @property
    def spec(self) -> ModelSpec:
        """`structure`, with what its layers take beside their weights, which is measured when it is first asked for."""
        return self._ported.spec

    def step_flops(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Necessary floating-point operations of a step over these micro-batches, and those of all other ranks.

        What a mask hides does not count, packed sequences attend to themselves alone, and only targets need the head.
        """
        batches = list(micro_batches)
        sequences = [each for batch in batches for each in sequences_of(batch)]
        own = step_flops(self.spec, sequences, sum(map(count_targets, batches)))
        return sum(self.world.exchange("operations", own))

    @one_at_a_time
    def peak_flops(self) -> float:
        """Operations per second of a large matrix product, measured once, on the devices of all ranks together."""
        return sum(self.world.exchange("operations per second", matmul_flops(self._device, self._streamer.dtype)))

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Write when each op of the next steps ran, once they have run, as a trace that Perfetto opens.

        The first step from now is left out, since it builds schedules and warms up.
        """
        self._trace = Trace(path, steps)

    def run_ops_in(self, region: Callable[[], AbstractContextManager[object]]) -> None:
        """Run every schedule inside the context manager that `region()` returns: a signal handler, say.

        An exception that it raises interrupts the step, which then counts as not begun; with clipping, the same call
        repeats it bit for bit."""
        self._streamer.region = region

    @property
    def router_aux_loss_coef(self) -> float | None:
        """What the router auxiliary loss is multiplied by; `None` where the model's config asks for none."""
        return self._ported.balance_coefficient

    @property
    def rounded(self) -> list[str]:
        """Frozen parameters that were no bfloat16 numbers where they came from: in bf16 they are held, and written, as
        the bfloat16 that they are computed with. In fp32 there are none."""
        return sorted(self._store.rounded)

    @property
    def disk(self) -> Disk | None:
        """The files for state on the disk, if there are folders for them."""
        return self._disk

    @property
    def steps(self) -> int:
        """Steps that have been done, those before a checkpoint was taken up included."""
        return self._steps

    @property
    def saver(self) -> Saver:
        """What writes checkpoints: to reserve its memory, and to see what it is at."""
        return self._saver

    def under_way(self) -> tuple[list[tuple[str, str, float]], float]:
        """What each stream is at, (op, stream, seconds so far), and the seconds since any op began or ended.

        For those who watch from another thread.
        """
        return self._streamer.under_way()

    def __repr__(self) -> str:
        """What it trains, how, how far it is and what it holds, on one line; at any time, on any thread."""
        numel, trained = self.structure.numel, self.structure.trained_numel
        frozen = "" if trained == numel else f", {trained:,} trained"
        held = {tier: self._pool.ledger.nbytes(tier) for tier, _ in self.memory_table()}
        memory = ", ".join(f"{amount(nbytes)} on the {tier}" for tier, nbytes in held.items() if nbytes)
        state = "closed" if self._turn.is_closed else f"{self._steps:,} steps, {memory}"
        how = f"{self.numerics.precision} on {self._device.name}"
        return f"<Engine of {self.structure.name}: {numel:,} parameters{frozen}, {how}, {state}>"

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

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _main_kind(self) -> Kind:
        """What runs over and over: steps, or forward passes where every parameter is frozen."""
        return "step" if self.structure.trained_numel else "forward"

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
        given = micro_batches, loss_fn, router_weights
        return checked_micro_batches(self._ported, self._device, self.world, *given, trains=trains)

    def _measure(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None,
        router_weights: Sequence[float] | None = None,
    ) -> StepResult:
        batches, work = self._checked(micro_batches, loss_fn, router_weights)
        self._settle()
        schedule = self._schedules.get("forward", work)
        with self._weights.blamed(self._steps), self._ported.evaluation_mode():
            return self._streamer.run_schedule(schedule, batches, None, 0, loss_fn, router_weights)

    def _flush(self) -> None:
        if self._sink.pending:
            self._streamer.run_schedule(self._schedules.get("flush", Work((1,))), [], self._sink)

    def _settle(self) -> None:
        """Apply what is pending, and refuse a state in which some units are ahead of others."""
        self._flush()
        self._sink.refuse_torn()

    def _fill(self, source: Fills, progress: Progress | None = None) -> None:
        self._saver.wait()
        self._weights.may_have_come()
        fill(source, self._store, self._store.names_by_unit(read=not self._ported.lies_in(source)), progress)

    def _take_up(self, checkpoint: Checkpoint, new: NewMoments) -> None:
        """Moments and counters of a checkpoint whose masters are there already."""
        facts = facts_in(checkpoint)
        refuse_other_base(checkpoint, self._store.frozen_checksum)
        read_moments(checkpoint, self._store, new)
        self._sink.restore(facts["updates"])
        self._steps, self._streamer.seed = facts["steps"], facts["seed"]
        self._saver.goes_on_from(checkpoint.folder)


def unverified(model: nn.Module, device: str, numerics: Numerics, policy: Policy) -> Engine:
    """An engine to check with, which cannot be checked itself. Each rank checks alone."""
    source = ModelSource(model)  # type: ignore[arg-type]  # a model of transformers
    return Engine.from_source(source, device=device, numerics=numerics, policy=policy, verify=False, world=ALONE)


__all__ = ["Engine", "StepOutput", "unverified"]
