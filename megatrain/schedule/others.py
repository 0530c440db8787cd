"""Other systems' steps as schedules of ours, to be replayed beside our own on the same machine and the same tokens.

* *Micro-batch-major* (offloading as DeepSpeed ZeRO-3 does it, Rajbhandari et al. 2021): each micro-batch goes through
  the whole model before the next, so that weights cross the bus twice and gradients once *per micro-batch*, and
  gradients are summed in host memory.
* *Interval checkpoints* (MegaTrain as published, 2026): layer-major, but only every k-th boundary is kept; in the
  backward pass a block's weights are streamed once more to compute its boundaries again: three loads in all.

In both the optimizer runs when the backward pass has ended (`Policy.update` "after_backward"). They are checked and
replayed, not executed.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.schedule.build import Builder, build_step
from megatrain.schedule.fetches import Visit
from megatrain.schedule.ops import Access, Op, Schedule
from megatrain.spec import ModelSpec, Policy, Work


def build_micro_major(model: ModelSpec, policy: Policy, work: Work) -> Schedule:
    """A step in which each micro-batch passes the whole model before the next."""
    return _MicroMajor(model, policy, work, "none", trains=True).step()


def build_interval(model: ModelSpec, policy: Policy, work: Work, interval: int) -> Schedule:
    """A layer-major step that keeps every `interval`-th boundary and computes the others again."""
    dropped = min(max(1, interval), len(model.layers)) - 1
    return build_step(model, replace(policy, activation_rows=(("input",), *(("drop",),) * dropped)), work)


class _MicroMajor(Builder):
    def step(self) -> Schedule:
        visits: list[Visit] = []
        everything = self.micros
        for micro in everything:
            self.micros = range(micro, micro + 1)
            visits += [self._forward_visit(unit) for unit in self.units[:-1]]
            visits += [self._loss_visit(), *self._backward_visits()]
        self.micros = everything
        return self._emit(visits)

    def _contribute(self, unit: int, reads: list[Access], writes: list[Access]) -> None:
        """A micro-batch's own gradient: complete when the unit's part of this micro-batch is."""
        (micro,) = self.micros
        terms = 2 if unit == 0 and self.model.tied else 1
        place = self._accumulator(unit)
        done = self.contributions[unit]
        if done:
            reads.append(replace(place, content=f"g{unit}.{micro}~{done}"))
        self.contributions[unit] = (done + 1) % terms
        writes.append(replace(place, content=f"g{unit}.{micro}" + (f"~{done + 1}" if done + 1 < terms else "")))

    def _gradient_out(self, unit: int) -> list[Op]:
        """Home with it, and there added to the sum of the micro-batches before."""
        if not self.trained[unit].size:
            return []
        (micro,) = self.micros
        source = self._accumulator(unit)
        each, out = (source.stop - source.start) // self.trained[unit].size, self.policy.grad_nbytes
        home = self._gradient_slot("landing", unit, "host")
        ops: list[Op] = []
        for shard in self.trained[unit].shards(max(1, self.policy.shard_nbytes // each)):
            start, stop = source.start + shard.start * each, source.start + shard.stop * each
            read = Access(source.buffer, start, stop, f"g{unit}.{micro}")
            write = Access(home, shard.start * out, shard.stop * out, f"g{unit}.{micro}")
            ops.append(Op("GRAD", "grad", unit, micro, shard=shard.index, reads=(read,), writes=(write,)))
        whole = self.trained[unit].size * out
        last = micro == self.work.micro_batches - 1
        landed = Access(home, 0, whole, f"g{unit}.{micro}")
        before = (Access(self._gradient_home(unit), 0, whole, f"g{unit}~{micro}"),) if micro else ()
        total = Access(self._gradient_home(unit), 0, whole, f"g{unit}" if last else f"g{unit}~{micro + 1}")
        ops.append(Op("ADD", "host", unit, micro, reads=(landed, *before), writes=(total,)))
        if last:
            norm = Access("host/norms", 8 * unit, 8 * unit + 8, f"n{unit}")
            ops.append(Op("NORM", "host", unit, reads=(total,), writes=(norm,)))
        return ops
