"""`Parts` holds the components of an engine (model, memory, streamer, optimizer), and what involves several of them.

A model split into units, a device, the pool and store with the training state, the streamer that executes schedules,
the optimizer, and the saver of checkpoints. `Engine` is the interface for users; whoever looks inside one, as
diagnostics and tests do, finds everything here. Nothing here takes a turn (`one_call_at_a_time`), except `prepare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatrain.checkpoint.load import Checkpoint
from megatrain.device import Device
from megatrain.dist import ALONE
from megatrain.engine import LossFn, MicroBatch, StepInput, StepResult, Streamer, check_micro_batches
from megatrain.engine.batch import TEXT_ENTRIES, as_list, check_arguments, model_entries, stage
from megatrain.engine.chunked_loss import check_loss, own_entries
from megatrain.engine.context import OpContext
from megatrain.engine.fused_forms import use_fused_functions
from megatrain.errors import BatchError, MegaTrainError, ModelError, PlanError
from megatrain.memory import Ledger, Pool, SharedMemory, Store
from megatrain.model import Fills, PortedModel, Progress
from megatrain.model.profile_prologue import plain_row, row_from, see, values_of
from megatrain.schedule import Schedule
from megatrain.spec import ModelSpec, Policy, Work
from megatrain.spec.layout import Ownership
from megatrain.spec.validate_fields import checked
from megatrain.train.async_save import Saver
from megatrain.train.nonfinite import NonfiniteCauses
from megatrain.train.one_call_at_a_time import TakesTurns, Turn, one_at_a_time
from megatrain.train.optimizer import StreamedOptimizer
from megatrain.train.options import EngineOptions, disk_of, files_of, limits_of, numerics_of, optimizer_of, policy_of
from megatrain.train.restore import NewMoments, facts_in, missed_in, read_moments, refuse_other_base
from megatrain.train.schedule_cache import Kind, Schedules, budgets


def work_of(inputs: Mapping[str, Any]) -> Work:
    """The work of a forward with these arguments. An encoder of images is not visited for text."""
    tokens, values = inputs["input_ids"].numel(), values_of(inputs, TEXT_ENTRIES)
    return Work((tokens,), beyond_text=values > 0, values_per_token=values / tokens)


class Parts(TakesTurns):
    """Everything that one engine allocates, without values until it is filled."""

    def __init__(self, ported: PortedModel, device: Device, options: EngineOptions) -> None:
        self.world = world = options.get("world") or ALONE
        ported.change(lambda spec: spec.over(world.size))
        algorithm, max_grad_norm = optimizer_of(options, ported), options.get("max_grad_norm", 1.0)
        self.structure: ModelSpec = ported.structure
        self.numerics, self.limits = numerics_of(options), limits_of(options)
        if self.numerics.kernels == "fused":
            use_fused_functions(ported, device)
        policy, fits = policy_of(options, device, self.structure), options.get("policy", "auto") == "auto"
        self.ported, self.device, self.disk = ported, device, disk_of(options, policy)
        self.owns_device = device is not options.get("device", "cpu")
        ledger = Ledger(budgets(self.limits, device, self.disk), one_memory=policy.shares_memory)
        shared, names = SharedMemory.of(self.structure, self.numerics, policy, device, world), self.structure.names
        self.pool = Pool(device, ledger, self.disk, names, policy.transfer, shared, files_of(ported))
        owned = Ownership.of(world.rank, self.numerics, policy)
        self.store = Store(self.structure, self.numerics, policy, self.pool, owned, world.together)
        self.schedules = Schedules(ported, self.store, self.numerics, policy, device, world, fits_activations=fits)
        try:
            self.schedules.get(self.main_kind, Work((1,)))
            self.optimizer = StreamedOptimizer(algorithm, max_grad_norm, self.structure, policy, device, owned, world)
            seed = options.get("seed", 0)
            self.streamer = Streamer(OpContext(ported, device, self.pool, self.numerics, policy, seed, world))
        except BaseException:
            self.pool.release()
            raise
        self.saver = Saver(ported, self.store, world.aside())
        self.optimizer.before_update = self.saver.gate.wait_for
        self.causes = NonfiniteCauses(self.store, self.streamer)
        self._turn = Turn()

    @property
    def turn(self) -> Turn:
        return self._turn

    @property
    def main_kind(self) -> Kind:
        """The kind of run that repeats: steps, or forward passes if every parameter is frozen."""
        return "step" if self.structure.trained_numel else "forward"

    @one_at_a_time
    def prepare(self, work: Work) -> Schedule:
        """Choose a plan for this work, build and check its schedule (a forward pass's if nothing trains), and allocate
        its memory, without running anything. Returns the schedule of a step without pending updates."""
        return self.schedules.get(self.main_kind, checked(work, Work, PlanError, "work"))

    def step_input(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_fn: LossFn | None = None,
        router_weights: Sequence[float] | None = None,
        *,
        trains: bool = False,
    ) -> StepInput:
        """What a step is asked, checked before anything is computed, with its micro-batches staged for the device.

        Raises `BatchError`, `LossError`, and `ModelError` if they are to train but every parameter is frozen. With
        several ranks, an error in one rank's micro-batches is raised on all.
        """
        if trains and self.structure.lowest_trained == len(self.structure.units):
            where = f"model {self.structure.name}"
            raise ModelError("every parameter is frozen", where=where, fix="freeze fewer of them")
        asked, ported = StepInput(), self.ported
        image_row: dict[str, Any] = {}

        def check() -> tuple[bool, float]:
            nonlocal asked, image_row
            check_loss(loss_fn)
            only_loss = own_entries(loss_fn)
            given = as_list(micro_batches)
            batches = stage(self.device, given, only_loss)
            work = check_micro_batches(self.structure, batches, alone=self.world.size == 1)
            if router_weights is not None and len(router_weights) != len(batches):
                what = f"{len(router_weights)} router_weights for {len(batches)} micro-batches"
                raise BatchError(what, where="step", fix="give one for each micro-batch")
            for index, batch in enumerate(batches):
                check_arguments(ported.arguments, batch, only_loss, f"micro-batch {index}")
            entries = [model_entries(batch, only_loss) for batch in batches]
            values = [values_of(of_batch, TEXT_ENTRIES) / of_batch["input_ids"].numel() for of_batch in entries]
            asked = StepInput(batches, work, loss_fn, router_weights)
            if trains and max(values) and ported.image_row is None:
                of_model = model_entries(given[values.index(max(values))], (*only_loss, "labels"))
                image_row = plain_row(of_model)
            return any(not of_batch.keys() <= TEXT_ENTRIES for of_batch in entries), max(values)

        told = self.world.agree("micro-batches of a step" if trains else "micro-batches to measure", check)
        most = max(values for _, values in told)
        if trains and most and ported.image_row is None:  # what they take was not planned
            rows = self.world.exchange("a row with images", image_row)
            row = row_from(next(row for row in rows if row))
            see(ported, row, values_of(row, TEXT_ENTRIES))
        work = replace(asked.work, beyond_text=any(beyond for beyond, _ in told), values_per_token=most)
        return replace(asked, work=work)

    def forward(self, asked: StepInput, number: int) -> StepResult:
        """Run a forward pass with its loss. number: of the step, which determines its dropout."""
        self.settle()
        return self.streamer.run_schedule(self.schedules.get("forward", asked.work), asked, None, number)

    def measure(self, asked: StepInput, steps: int) -> StepResult:
        """Run a forward pass with its loss, without dropout. steps: number of steps done."""
        forward = partial(self.forward, asked, 0)
        with self.ported.evaluation_mode(), self.causes.named(steps, forward):
            return forward()

    def flush(self) -> None:
        if self.optimizer.pending:
            self.streamer.run_schedule(self.schedules.get("flush", Work((1,))), StepInput(), self.optimizer)

    def settle(self) -> None:
        """Apply pending updates, and refuse a state in which some units are ahead of others."""
        self.flush()
        self.optimizer.refuse_torn()

    def fill(self, source: Fills, progress: Progress | None = None) -> None:
        """Set every parameter from a source, keeping optimizer and counters."""
        self.saver.wait()
        self.causes.weights_replaced()
        source.fill(self.store, self.store.names_by_unit(read=not self.ported.lies_in(source)), progress)

    def take_up(self, checkpoint: Checkpoint, new: NewMoments) -> int:
        """Load moments and counters of a checkpoint whose masters are already loaded. Returns its number of steps."""
        facts = facts_in(checkpoint)
        refuse_other_base(checkpoint, self.store.frozen_checksum)
        algorithm = self.optimizer.algorithm
        read_moments(checkpoint, self.store, algorithm, new)
        self.optimizer.restore(facts["updates"], missed_in(checkpoint, self.structure, algorithm))
        self.streamer.context.seed = facts.get("seed", self.streamer.context.seed)
        self.saver.goes_on_from(checkpoint.folder)
        return int(facts["steps"])

    def adopt(self, policy: Policy) -> None:
        """Move the state to where the policy places it; after an error, to where it was."""
        before, fits, saves = self.schedules.policy, self.schedules.fits_activations, self.saver.is_reserved
        self._use(policy)
        try:
            if saves:
                self.saver.reserve()  # before the next schedule's slots, which may take all memory
            self.schedules.get(self.main_kind, Work((1,)))
        except MegaTrainError:
            self._use(before, fits_activations=fits)
            raise

    def _use(self, policy: Policy, *, fits_activations: bool = False) -> None:
        self.schedules.adopt(policy, fits_activations=fits_activations)
        self.streamer.context.policy = policy
        self.optimizer.adopt(policy)

    def close(self) -> None:
        """Stop the workers and free the memory. In a forked child this does nothing."""
        if self._turn.is_closed or self._turn.process.is_elsewhere:
            return
        with self._turn.of("close"):
            self._turn.is_closed = True
            self.saver.abandon()
            try:
                self.pool.release()
            finally:
                if self.disk is not None:
                    self.disk.close()
                if self.owns_device:
                    self.device.close()
            self.schedules.clear()
