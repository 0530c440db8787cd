"""Models whose layers pass more than the hidden state equal the stock model in loss and every gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from megatrain import Engine, Policy
from megatrain.errors import ScheduleError
from megatrain.model import port_model
from megatrain.model.tiny import shrink, twin_from, with_dropout
from megatrain.plan.spec_file import as_fields, read_model
from megatrain.schedule.build import build_step
from megatrain.schedule.check import check
from megatrain.schedule.contents import Side, SideGradient
from megatrain.schedule.deps import derive_waits
from megatrain.schedule.ops import Schedule
from megatrain.spec import Numerics, Work
from megatrain.train.parity import compare, full_settings, short_cases, short_settings

PASSING = {
    "glm_moe_dsa": {False},
    "hy_v4": {False},
    "zaya": {True},
    "gemma4_text": {True},
}
"""Model type -> whether its side values need a gradient: sparse indices, router states, inputs of each layer."""

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def make(model: PreTrainedModel, device: str, numerics: Numerics, policy: Policy) -> Engine:
    return Engine.from_model(model, device, numerics=numerics, policy=policy, verify=False)


def twin(kind: str, **fields: Any) -> PreTrainedModel:
    return twin_from(with_dropout(shrink(AutoConfig.for_model(kind, **fields)), 0.0), 0)


@pytest.mark.parametrize(
    "kind", ["zaya", "gemma4_text", *(pytest.param(k, marks=pytest.mark.slow) for k in ("glm_moe_dsa", "hy_v4"))]
)
def test_loss_and_gradients_equal_the_stock_model(kind: str) -> None:
    model = twin(kind)
    with make(model, "cpu", Numerics("fp32"), Policy(shares_memory=True)) as engine:
        sides = engine._streamer.spec.sides
    assert {side.differentiable for side in sides} == PASSING[kind]
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst


def test_keys_and_values_of_earlier_layers_get_the_gradients_of_all_that_use_them() -> None:
    model = twin("gemma4_text", num_kv_shared_layers=2)
    report = compare(model, make, short_cases(model), [*short_settings(), full_settings()[-1]], 1e-6, enough=1)
    assert report.ok, report.worst


def schedule_of(kind: str, **fields: Any) -> Schedule:
    spec = port_model(twin(kind, **fields), torch.float32).spec
    assert read_model({"model": json.loads(json.dumps(as_fields(spec)))}, "a file") == spec
    assert all(side.size.nbytes(4, 4) > 0 for side in spec.sides)
    return build_step(spec, Numerics("fp32"), Policy(activations="recompute"), Work((40, 20), length=20))


def test_the_checker_proves_side_values_and_misses_no_lost_one() -> None:
    """A value or a sum of gradients that is not there is found, as is one that another value has replaced."""
    schedule = schedule_of("gemma4_text", num_kv_shared_layers=2)
    check(schedule)
    kinds = {type(each.content) for op in schedule.ops for each in (*op.reads, *op.writes)}
    assert {Side, SideGradient} <= kinds
    for kind in (Side, SideGradient):
        for index, op in enumerate(schedule.ops):
            if op.micro or not any(isinstance(each.content, kind) for each in op.writes):
                continue
            ops = list(schedule.ops)
            ops[index] = op._replace(writes=tuple(each for each in op.writes if not isinstance(each.content, kind)))
            with pytest.raises(ScheduleError, match="but finds"):
                check(derive_waits(replace(schedule, ops=tuple(ops), waits=())))


def test_a_side_value_lives_until_the_last_backward_that_reads_it() -> None:
    schedule = schedule_of("zaya")
    (begin, end), *_ = (life for name, life in schedule.lifetimes.items() if name.startswith("device/side_values/"))
    assert (schedule.ops[begin].kind, schedule.ops[begin].unit) == ("FORWARD", 1)
    assert (schedule.ops[end].kind, schedule.ops[end].unit) == ("BACKWARD", 2)


def test_values_below_all_that_is_trained_get_no_gradient() -> None:
    model = twin("zaya")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    spec = port_model(model, torch.float32).structure
    assert not any(spec.wants_gradient(side) for side in spec.sides)
    report = compare(model, make, short_cases(model), short_settings(), 1e-6, enough=1)
    assert report.ok, report.worst
