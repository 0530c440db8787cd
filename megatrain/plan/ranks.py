"""The planner's input for one rank of several: its share of a step, of the state and of the machine.

All ranks do the same at the same time, each with its own device. So each gets an equal share of the memory and
bandwidth that the devices of a machine have in common, and the plan of one rank is the plan of all. Collectives are
priced in `collective_cost`, and ranks are started by `run.ranks`. Ranks with different devices or machines are not
supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from megatrain.errors import PlanError
from megatrain.formatting import counted
from megatrain.plan.cost import copy_bandwidth, disk_bandwidths, host_dram_bandwidth, optimizer_bandwidth
from megatrain.plan.machines import machine, machine_names
from megatrain.plan.question import Plan, Question
from megatrain.spec import Hardware, Limits

FIXED: Mapping[str, Any] = {"read_ahead_nbytes": 0, "micro_batches_per_round": 0}
"""Fields of the policy that a plan for several ranks does not choose. Rounds would have to be as many on each rank, and
each rank would keep whole sums of gradients between them."""

SHARED = (
    *("host_bandwidth", "host_dram_bandwidth", "norm_bandwidth"),
    *("disk_read_bandwidth", "disk_write_bandwidth", "disk_duplex_read_bandwidth", "disk_duplex_write_bandwidth"),
)
"""Rates of a machine that its ranks share."""

OF_CORES = (*("flops", "flops_fp32", "products", "attention", "device_bandwidth", "elementwise"),)
"""Rates that the ranks share, in addition to `SHARED`, if they compute on the cores of the host."""


def ranks_on_each(ranks: int, nodes: int) -> int:
    """Ranks per machine. Raises `PlanError` unless `nodes` machines can have equal numbers of them."""
    for name, count in (("ranks", ranks), ("nodes", nodes)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PlanError(f"{count!r} is not valid", where=name, fix="give 1 or more")
    if ranks % nodes:
        what = f"{counted(ranks, 'rank')} cannot be divided evenly among {nodes} machines"
        raise PlanError(what, where="nodes", fix=f"give a divisor of {ranks}, or {nodes} ranks for each")
    return ranks // nodes


def question_of_one(question: Question, ranks: int, here: int) -> Question:
    """The question for one of several ranks, from the question for all of them.

    question: for the step of all ranks, on one of the machines with its limits.
    here: ranks on each machine.

    Raises `PlanError` if the machines lack devices or the bandwidth of a link for these ranks, or if the step cannot be
    divided evenly. With a `micro_batch` override, some ranks may have one micro-batch more than others; the question is
    for one of these.
    """
    if ranks == 1:
        return question
    hardware, limits = share_of(question.hardware, ranks, here), question.limits
    host, disk = _part(limits.host_nbytes, here), _part(limits.disk_nbytes, here)
    if question.hardware.shares_memory:
        host = _part(host, 2)  # the other half counts as device memory
        limits = replace(limits, device_nbytes=host)
    count, size, micro_batch = question.sequences, 1, question.overrides.get("micro_batch")
    if micro_batch is not None:
        count, size = -(-question.sequences // micro_batch), micro_batch
    if count < ranks or (micro_batch is None and count % ranks):
        noun = "sequence" if micro_batch is None else "micro-batch"
        what = f"{counted(count, noun)} per step cannot be divided evenly among {ranks} ranks"
        raise PlanError(what, where="tokens_per_step", fix=f"give a multiple of {ranks}, or fewer ranks")
    rows = -(-count // ranks) * size
    return replace(
        question,
        model=question.model.over(ranks),
        hardware=hardware,
        tokens_per_step=rows * question.length,
        parts=question.sequences / rows,
        overrides={**FIXED, **question.overrides},
        limits=Limits(limits.device_nbytes, host, disk),
    )


def limits_of_machine(question: Question, of_one: Mapping[str, int]) -> dict[str, int]:
    """Tier -> bytes of a machine, as users limit them, of which `question_of_one` gives a rank so many.

    of_one: tier -> bytes of one rank.
    """
    hardware, nbytes = question.hardware, dict(of_one)
    if hardware.slots_in_host and (halves := [nbytes.pop(tier) for tier in ("host", "device") if tier in nbytes]):
        nbytes["host"] = 2 * max(halves)
    return {tier: count if tier == "device" else hardware.sharing_ranks * count for tier, count in nbytes.items()}


def by_delivery(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """The faster of the plans that `search` finds for each `Policy.delivery`.

    Host memory can be shared only by ranks of one machine. If neither plan fits, raises the error of the first.
    """
    hardware, ranks = question.hardware, question.model.ranks
    if ranks == 1 or "delivery" in question.overrides:
        return search(question)
    plans, failures = [], []
    for delivery in ("gather", "shared") if hardware.sharing_ranks == ranks else ("gather",):
        try:
            plans.append(search(replace(question, overrides={**question.overrides, "delivery": delivery})))
        except PlanError as failure:  # it does not fit, or an override contradicts this delivery
            failures.append(failure)
    if not plans:
        raise failures[0]
    return min(plans, key=lambda plan: plan.seconds)


def share_of(hardware: Hardware, ranks: int, here: int) -> Hardware:
    """The share of one rank in its machine, if each machine has `here` of the ranks.

    Raises `PlanError` if it lacks devices or the bandwidth of a link for them.
    """
    if ranks == 1:
        return hardware
    _refuse_lacking(hardware, ranks, here)
    bus = min(inf, (hardware.shared_bus_bandwidth or inf) / here)
    if hardware.shares_memory:
        hardware = _with_slots_in_host(hardware, here)
    counts = sorted({-(-threads // here) for threads, _ in hardware.optimizer_bandwidth})
    by_threads = tuple((count, optimizer_bandwidth(hardware, count * here) / here) for count in counts)
    shared: dict[str, Any] = {
        name: _part(getattr(hardware, name), here)
        for name in ("host_nbytes", "disk_nbytes", "disk_endurance_nbytes", "pinnable_nbytes")
    }
    read, write = disk_bandwidths(hardware)
    known = {"host_dram_bandwidth": host_dram_bandwidth(hardware), "disk_read_bandwidth": read}
    known["disk_write_bandwidth"] = write
    shared |= {name: _over(known.get(name) or getattr(hardware, name), here) for name in SHARED}
    buses = ("fetch_bandwidth", "grad_bandwidth", "pageable_fetch_bandwidth", "pageable_grad_bandwidth")
    both = ("duplex_fetch_bandwidth", "duplex_grad_bandwidth")
    shared |= {name: _at_most(getattr(hardware, name), bus) for name in (*buses, *both)}
    return replace(hardware, **shared | {"optimizer_bandwidth": by_threads, "sharing_ranks": here})


def lacking_links(hardware: Hardware, ranks: int, here: int) -> list[str]:
    """Fields of `Hardware` for links that these ranks use and whose bandwidth is unknown."""
    used = {"link_bandwidth": here > 1, "node_bandwidth": ranks > here}
    return [field for field, is_used in used.items() if is_used and not getattr(hardware, field)]


def _refuse_lacking(hardware: Hardware, ranks: int, here: int) -> None:
    """Raise `PlanError` if the machine lacks devices or the bandwidth of a link."""
    if here > hardware.devices and not hardware.shares_memory:
        gpus = "one GPU" if hardware.devices == 1 else f"{hardware.devices} GPUs"
        what = f"{here} ranks on each machine, and {hardware.name} has {gpus}"
        raise PlanError(what, where="ranks", fix=_machines_with(here, hardware))
    if hardware.shares_memory:
        hardware = _with_slots_in_host(hardware, here)
    for field in lacking_links(hardware, ranks, here):
        link = "between its devices" if field == "link_bandwidth" else "to other machines"
        key = f"{field.removesuffix('_bandwidth')}_bytes_per_second"
        what = f"the bandwidth {link} is unknown"
        raise PlanError(what, where=f"hardware {hardware.name}", fix=f"add {key} to its file")


def _machines_with(devices: int, hardware: Hardware) -> str:
    """What to do if so many devices are needed, with described machines that have them."""
    large = [name for name in machine_names() if machine(name).devices >= devices]
    alike = [name for name in large if machine(name).flops == hardware.flops] or large
    fewer = f"give {hardware.devices} ranks, or more nodes" if hardware.devices > 1 else "plan for one rank on each"
    return f"{fewer}; machines with {devices} or more: {', '.join(alike)}" if alike else fewer


def _with_slots_in_host(hardware: Hardware, here: int) -> Hardware:
    """The machine for ranks that compute in host memory, as on a CPU: each has its share of the cores, and slots in
    half of the host memory. Collectives copy between the memories of two ranks."""
    copies = copy_bandwidth(hardware)
    hardware = hardware.scaled(OF_CORES, 1 / here)
    half = hardware.host_nbytes // 2
    changed: dict[str, Any] = {"host_nbytes": half, "device_nbytes": half // here, "pinnable_nbytes": None}
    changed |= {"link_route": "host", "shares_memory": False, "slots_in_host": True}
    if hardware.link_bandwidth is None:
        changed["link_bandwidth"] = copies / 2
        changed["sources"] = (*hardware.sources, ("link_bandwidth", "assumed: half of what one thread copies"))
    return replace(hardware, **changed)


def _part(count: int | None, here: int) -> int | None:
    return None if count is None else count // here


def _over(rate: float | None, here: int) -> float | None:
    return None if rate is None else rate / here


def _at_most(rate: float | None, most: float) -> float | None:
    return None if rate is None else min(rate, most)
