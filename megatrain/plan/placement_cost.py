"""The cost of placements: how they change the busy seconds of each stream in a step, from all state in host memory.

These are sums of bytes over bandwidths, enough to tell which placements are worth a replay. Only the replay tells how
streams overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf

from megatrain.plan.cost import (
    DRAM,
    bus_bandwidths,
    disk_bandwidths,
    duplex_disk_bandwidths,
    host_dram_bandwidth,
    optimizer_bandwidth,
    update_nbytes,
)
from megatrain.schedule.passes.pieces import LOW_BITS_NBYTES, STATE_NBYTES
from megatrain.schedule.passes.state_buffers import fills_slot, units_alike
from megatrain.spec import IN_HOST, Hardware, ModelSpec, Numerics, Placement, Policy
from megatrain.spec.layout import Layout, layout_of


def placement_seconds(
    model: ModelSpec, numerics: Numerics, policy: Policy, hardware: Hardware, rounds: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """Stream -> seconds that the policy's placements add to a step (negative if they save time), and of these the
    seconds after the forward pass. rounds: of a step."""
    added, late = Counter[str](), Counter[str]()
    for index, placement, count in units_alike(model, policy):
        if placement == IN_HOST:
            continue
        of_unit = _unit_seconds(model, numerics, policy, hardware, index, placement, rounds)
        for total, seconds_by_stream in zip((added, late), of_unit, strict=True):
            for stream, seconds in seconds_by_stream.items():
                total[stream] += count * seconds  # type: ignore[assignment]
    shares = {"fetch": 0.5, "grad": 1.0, **({} if policy.update == "next_forward" else {"host": 1.0, "compute": 1.0})}
    all_late = {**late, **{stream: share * added.get(stream, 0.0) for stream, share in shares.items()}}
    whole, behind = _with_dram(added, hardware, policy), _with_dram(all_late, hardware, policy)
    ways = zip(("read", "write"), duplex_disk_bandwidths(hardware), disk_bandwidths(hardware), strict=True)
    (ended, *_), (spent, direction, share) = sorted(
        (added.get(direction, 0.0), direction, both / one) for direction, both, one in ways
    )
    if spent and not hardware.shares_memory:  # the way that takes longer has its full rate once the other has ended
        whole[direction] = ended + (spent - ended) * share
        behind[direction] = behind.get(direction, 0.0) * whole[direction] / spent
    return whole, behind


def _with_dram(added: Mapping[str, float], hardware: Hardware, policy: Policy) -> dict[str, float]:
    """`added`, with the entry `DRAM` for the bytes that these streams move in host memory."""
    if hardware.shares_memory:
        return dict(added)
    fetching, leaving = bus_bandwidths(hardware, policy.transfer)
    reading, writing = duplex_disk_bandwidths(hardware)
    rates = {"fetch": fetching, "grad": leaving, "host": optimizer_bandwidth(hardware, policy.host_threads)}
    rates |= {"read": 2 * reading, "write": 2 * writing}
    moved = sum(seconds * rates.get(stream, 0.0) for stream, seconds in added.items() if seconds)
    return {**added, DRAM: moved / host_dram_bandwidth(hardware)}


def _unit_seconds(
    model: ModelSpec,
    numerics: Numerics,
    policy: Policy,
    hardware: Hardware,
    index: int,
    placement: Placement,
    rounds: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """Stream -> seconds that one unit's placement adds to a step; and of those of the disk, the seconds after the
    forward pass."""
    layout, has_backward = layout_of(model.units[index]), index in model.streamed and model.has_backward(index)
    weights, trained = layout.own_size * numerics.weight_nbytes, layout.trained.own_size
    visits = rounds * (2 if has_backward else 1)
    sums = 4 * layout.trained.size * (rounds - 1)  # bytes of gradient sums that wait in host memory between rounds
    fetches = visits + int(index == 0 and model.tied and policy.read_ahead_nbytes > 0)  # once more for the head
    fetching, leaving = bus_bandwidths(hardware, policy.transfer)
    if placement.on_device:
        touched = update_nbytes(layout, numerics)
        saved = {
            "fetch": -(fetches * weights + sums) / fetching,
            "grad": -(trained * numerics.grad_nbytes + sums) / leaving,
            "host": -touched / optimizer_bandwidth(hardware, policy.host_threads),
            "compute": touched / (hardware.device_bandwidth or inf),
        }
        return saved, {}
    kept = -(fetches - 1) * weights if placement.weights == "device" else 0
    read_each = _read_nbytes(layout, numerics, placement)
    reads = writes = 0.0
    if placement.moments == "disk":
        reads = writes = STATE_NBYTES * sum(layout.own_state_sizes)
    if placement.low_bits == "disk" and numerics.precision == "bf16":
        reads, writes = reads + LOW_BITS_NBYTES * trained, writes + LOW_BITS_NBYTES * trained
    if placement.gradients == "disk" and policy.update != "during_backward":
        reads, writes = reads + trained * numerics.grad_nbytes, writes + trained * numerics.grad_nbytes
    reads += visits * read_each
    if placement.weights == "disk":
        writes += trained * numerics.weight_nbytes
        is_once_more = not (policy.update == "next_forward" and fills_slot(layout, policy, placement))
        reads += trained * numerics.weight_nbytes * (is_once_more and not policy.shares_memory)
    reading, writing = duplex_disk_bandwidths(hardware)
    late_reads = rounds * read_each if has_backward else 0.0
    late_writes = trained * numerics.grad_nbytes if placement.gradients == "disk" else 0.0
    if policy.update == "during_backward":
        late_reads, late_writes = reads - rounds * read_each, writes
    added = {
        "fetch": kept / fetching,
        "read": reads / reading,
        "write": writes / writing,
    }
    return added, {"read": late_reads / reading, "write": late_writes / writing}


def _read_nbytes(layout: Layout, numerics: Numerics, placement: Placement) -> int:
    """Bytes of a unit's weights that are read from the disk or from files for each visit."""
    if placement.weights == "disk":
        return layout.own_size * numerics.weight_nbytes
    return (layout.size - layout.files_start) * numerics.weight_nbytes if placement.weights == "file" else 0
