"""Values that users make by hand take what fits their fields, and refuse everything else by the field's name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pytest

from megatrain.errors import ConfigError, MegaTrainError, PlanError
from megatrain.losses import DPO, SmoothedCrossEntropy
from megatrain.optim import AdamW, LrSchedule
from megatrain.schedule import build_flush, build_forward, build_step, check
from megatrain.spec import Limits, Numerics, Placement, Policy, Tier, Work
from megatrain.spec.validate_fields import Bounds, check_fields
from tests.small import small_spec

GOOD: list[Any] = [
    Limits(host_nbytes=3),
    Numerics(),
    Policy(),
    Policy(placements=(Placement(),), activations_by_layer=(("input",), ("drop", "graph")), recompute_slots=3),
    Placement(),
    Work((4, 5), 3),
    AdamW(no_decay=("*bias",)),
    LrSchedule("wsd", 10, 2, 0.5, 5),
    DPO(),
    SmoothedCrossEntropy(),
]
FIELDS = [
    pytest.param(value, field.name, id=f"{type(value).__name__}.{field.name}")
    for value in GOOD
    for field in fields(value)
]
NAN, INF = float("nan"), float("inf")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(("good", "name"), FIELDS)
def test_fields_of_wrong_types_are_refused_by_name(good: Any, name: str) -> None:
    error = PlanError if isinstance(good, Limits | Numerics | Policy | Placement | Work) else ConfigError
    wrong = ["2", "yes", b"fp32", INF, -INF, NAN, -1, -0.5, 10**400, 2j, {}, {1}, object(), Unprintable(), np.zeros(2)]
    wrong += [("2",), (NAN,), ((True,),), [[]], Fraction(1, 3) - 1, "\n" * 200, Placement, Policy()]
    wrong += [True, False] if not isinstance(getattr(good, name), bool) else [0, 1, np.int64(1)]
    for value in wrong:
        if name == "no_decay" and isinstance(value, tuple) and value == ("2",):
            continue
        with pytest.raises(error) as caught:
            replace(good, **{name: value})
        said = str(caught.value)
        assert name in caught.value.where, said
        assert "\n" not in said
        assert len(said) < 300
        assert caught.value.fix


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.int8])
def test_numpy_integers_are_stored_as_int(kind: type) -> None:
    policy = Policy(
        weight_slots=kind(3), shard_nbytes=kind(100), read_ahead_nbytes=kind(0), shares_memory=np.bool_(True)
    )
    assert policy == Policy(weight_slots=3, shard_nbytes=100, read_ahead_nbytes=0, shares_memory=True)
    assert {type(policy.weight_slots), type(policy.shard_nbytes), type(policy.shares_memory)} == {int, bool}
    work = Work([kind(4), 5], kind(3))  # type: ignore[arg-type]
    assert work == Work((4, 5), 3)
    assert hash(work) == hash(Work((4, 5), 3))
    assert {type(each) for each in work.tokens} == {int}


def test_equivalent_lists_and_numbers_are_accepted() -> None:
    adamw = AdamW(lr=np.float32(0.5), betas=[0, np.float64(0.5)], no_decay=["*bias"], weight_decay=1)  # type: ignore[arg-type]
    assert adamw == AdamW(lr=0.5, betas=(0.0, 0.5), no_decay=("*bias",), weight_decay=1.0)
    assert type(adamw.lr) is type(adamw.betas[1]) is float
    rows = Policy(activations_by_layer=[["input"], ["drop"]], placements=[Placement()] * 3)  # type: ignore[arg-type]
    assert rows == Policy(activations_by_layer=(("input",), ("drop",)), placements=(Placement(),) * 3)
    assert hash(rows)


def test_messages_name_the_entry_and_the_allowed_values() -> None:
    with pytest.raises(PlanError, match=r"policy\.activations_by_layer\[1\]\[0\]: 'forget' is not valid; use graph, "):
        Policy(activations_by_layer=(("input",), ("forget",)))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"policy\.recompute_slots: '2' is not valid; use a whole number, 1 to 4096 or"):
        Policy(recompute_slots="2")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"policy\.shares_memory: 'yes' is not valid; use true or false"):
        Policy(shares_memory="yes")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"placement\.moments: 'vram' is not valid; use device, host or disk"):
        Placement(moments="vram")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"work\.tokens\[1\]: 2\.0 is not valid; use a whole number, 1 "):
        Work((1, 2.0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^betas: 0\.9 is not valid; use 2 values, a finite number, 0 to 1 and"):
        AdamW(betas=0.9)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"policy\.placements\[0\]: 'disk' is not valid; use a Placement"):
        Policy(placements=("disk",))  # type: ignore[arg-type]


def test_any_dataclass_can_be_checked() -> None:
    @dataclass
    class Plain:
        size: Annotated[int, Bounds(1, 3)] | None = None
        kind: Literal["a"] = "a"

        def __post_init__(self) -> None:
            check_fields(self, MegaTrainError, "plain.")

    Plain.__annotations__ = {"size": Annotated[int, Bounds(1, 3)] | None, "kind": Literal["a"]}
    assert Plain(np.int64(3)).size == 3
    with pytest.raises(MegaTrainError, match=r"^plain\.size: 4 is not valid; use a whole number, 1 to 3 or None$"):
        Plain(4)
    with pytest.raises(MegaTrainError, match=r"^plain\.kind: 'b' is not valid; use a$"):
        Plain(kind="b")  # type: ignore[arg-type]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"shares_memory": True},
    {"update": "during_backward"},
    {"wait_for": "shard", "read_ahead_nbytes": 256, "shard_nbytes": 256},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_every_accepted_placement_has_a_schedule(changes: dict[str, Any]) -> None:
    """Of all units or of one, each combination of tiers is refused where it is made, or its schedules are proven."""
    model, taken = small_spec(2), 0
    for tiers in itertools.product(get_args(Tier), repeat=4):
        for units in (range(4), (2,)):
            try:
                placement = Placement(*tiers)
                policy = Policy(
                    placements=tuple(placement if unit in units else Placement() for unit in range(4)), **changes
                )
            except PlanError:
                continue
            taken += 1
            check(build_step(model, Numerics(), policy, Work((4, 4))))
            check(build_forward(model, Numerics(), policy, Work((4,))))
            if policy.update == "next_forward":
                check(build_step(model, Numerics(), policy, Work((4,)), "all"))
                check(build_flush(model, Numerics(), policy))
    assert taken >= 2 * 16


def test_gradients_of_device_updated_units_cannot_be_on_disk() -> None:
    with pytest.raises(PlanError, match=r"placement\.gradients: .* waits there, not on the disk; leave gradients out"):
        Placement("device", "device", "device", "disk")


@pytest.mark.parametrize("count", [3, 5])
def test_placements_for_a_wrong_number_of_units_are_refused(count: int) -> None:
    with pytest.raises(PlanError, match=f"places the state of {count} units, but the model has 4"):
        build_step(small_spec(2), Numerics(), Policy(placements=(Placement(),) * count), Work((4,)))
