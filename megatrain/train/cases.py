"""What an engine is asked when it is compared with the stock model: steps to compute, and ways to compute them.

Padding is on the left too, since behind a causal mask padding on the right touches nothing that counts; micro-batches
are unequal, so that a mean of means is not the mean; sequences are longer than the windows and chunks of a twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from megatrain.engine import MicroBatch
from megatrain.model.arguments import arguments_of
from megatrain.model.ported import takes
from megatrain.model.twin import StockModel, ordinary_tokens
from megatrain.spec import ActivationPlan, Keep, Policy

SIM = "sim:7"
ACTIVATION_PLANS: tuple[ActivationPlan, ...] = get_args(ActivationPlan)
MIXTURE: tuple[tuple[Keep, ...], ...] = (("offload", "graph"), ("drop",))
STORED: tuple[tuple[Keep, ...], ...] = (("chosen", "attention"),)


@dataclass(frozen=True, slots=True)
class Case:
    """One step to compute: its micro-batches, under a name."""

    name: str
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to compute it."""

    name: str
    device: str
    policy: Policy


def micro_batch(
    tokens: Sequence[int], rows: int, length: int, seed: int, left: int = 0, right: int = 0
) -> dict[str, Tensor]:
    """Random tokens int64[rows, length]; `left` of the first row and `right` of the last are padding, at that end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(tokens)[torch.randint(len(tokens), (rows, length), generator=generator)]
    if not left and not right:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[-1, length - right :] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _read_by(model: StockModel, cases: Sequence[Case]) -> list[Case]:
    """The cases without masks if nothing in the model reads one: then an engine refuses them."""
    if "attention_mask" in arguments_of(model, ()):
        return list(cases)
    without = [
        [{key: each[key] for key in each if key != "attention_mask"} for each in case.micro_batches] for case in cases
    ]
    return [replace(case, micro_batches=tuple(batches)) for case, batches in zip(cases, without, strict=True)]


def packed(tokens: Sequence[int], lengths: Sequence[int], seed: int) -> dict[str, Tensor]:
    """One row of several documents, told apart by position ids that start again."""
    batch = micro_batch(tokens, 1, sum(lengths), seed)
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return batch


def short_cases(model: StockModel) -> list[Case]:
    """Two unequal micro-batches, the first with padding. The first case that the stock model can compute is enough.

    Padding on the left comes first: behind a causal mask, padding on the right touches nothing that counts.
    """
    tokens = ordinary_tokens(model.config)
    single = micro_batch(tokens, 1, 7, 1)
    cases = [
        Case("two micro-batches, padded on both sides", (micro_batch(tokens, 2, 10, 0, left=3, right=2), single)),
        Case("two micro-batches, padded on the right", (micro_batch(tokens, 2, 10, 0, right=3), single)),
        Case("two micro-batches of whole rows", (micro_batch(tokens, 2, 10, 0), single)),
    ]
    return _read_by(model, cases)


def full_cases(model: StockModel) -> list[Case]:
    """Whole rows, padding on either side, packing (where the model takes positions), several unequal micro-batches."""
    tokens = ordinary_tokens(model.config)
    whole, single = micro_batch(tokens, 2, 12, 2), micro_batch(tokens, 1, 7, 1)
    right, left = micro_batch(tokens, 2, 10, 0, right=3), micro_batch(tokens, 3, 9, 3, left=4)
    cases = [
        Case("whole rows", (whole,)),
        Case("padding on the right", (right,)),
        Case("padding on the left", (left,)),
        Case("several micro-batches", (left, single, right)),
    ]
    if takes(model, "position_ids"):
        cases.append(Case("packed documents", (packed(tokens, (6, 3, 5), 4),)))
    return _read_by(model, cases)


def short_settings() -> list[Setting]:
    """Keeping graphs; computing layers again, their token-wise parts in chunks; and some of their ops alone."""
    each = [_setting("cpu", plan, loss_chunk_tokens=5) for plan in ACTIVATION_PLANS]
    chosen = Setting("cpu, chosen outputs", "cpu", replace(each[-1].policy, activation_rows=STORED))
    chunks = Setting("cpu, recompute, in chunks", "cpu", replace(each[-1].policy, mlp_chunk_tokens=4))
    return [*each[:-1], chunks, chosen]


def full_settings() -> list[Setting]:
    """Every activation plan, and a mixture, on the cpu and the simulated device, with few and many slots and pieces."""
    each = [_setting("cpu", plan) for plan in ACTIVATION_PLANS]
    each += [_setting(SIM, plan, shard_nbytes=1 << 16) for plan in ACTIVATION_PLANS]
    each.append(_setting(SIM, "recompute", shard_nbytes=1 << 14, weight_slots=1, grad_slots=1, mlp_chunk_tokens=4))
    mixed = replace(each[-1].policy, activation_rows=MIXTURE, offload_slots=1, recompute_slots=1)
    stored = replace(each[-1].policy, activation_rows=STORED)
    return [
        *each,
        Setting(f"{SIM}, chosen outputs, 1 slot", SIM, stored),
        Setting(f"{SIM}, a mixture of plans, 1 slot", SIM, mixed),
    ]


def _setting(device: str, activations: ActivationPlan, **changes: Any) -> Setting:
    changes = {"loss_chunk_tokens": 7, **changes}
    policy = Policy("fp32", shares_memory=device == "cpu", activations=activations, host_threads=1, **changes)
    slots = f", {policy.weight_slots} slot" if policy.weight_slots == 1 else ""
    return Setting(f"{device}, {activations}{slots}", device, policy)
