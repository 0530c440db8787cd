"""On a GPU: matrices that are updated whole get the same bits wherever their state is, and a retry repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from megatrain import AdamW, Engine, Policy
from megatrain.optim import Muon
from megatrain.schedule.passes import pieces
from megatrain.spec import Numerics, Placement
from tests.tiny import equal, tiny_model, unequal_batches

pytestmark = pytest.mark.gpu

PLACES = {
    "host": Placement(),
    "device": Placement("device", "device", "device"),
    "cached": Placement("device"),
    "disk": Placement("disk", "disk", "disk", "disk"),
}


def trained(place: Placement, update: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    policy = Policy(placements=(place,) * 5, update=update, shard_nbytes=2048)  # type: ignore[arg-type]
    muon, clip = Muon(lr=1e-2, adamw=AdamW(lr=3e-3)), None if update == "during_backward" else 0.5
    model = tiny_model(attn_implementation="eager")
    numerics = Numerics("bf16", loss_chunk_tokens=8)
    with Engine.from_model(
        model, "cuda", "bf16", muon, clip, policy, numerics=numerics, verify=False, disk=[folder]
    ) as engine:
        losses = [engine.step(unequal_batches(count)).loss for count in (2, 3, 1)]
        return losses, engine.master_weights()


@pytest.mark.parametrize("update", ["next_forward", "during_backward"])
def test_no_placement_changes_a_bit(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "GROUP_NBYTES", 4096)
    losses, weights = trained(PLACES["host"], update, tmp_path)
    assert losses[-1] < losses[0]
    for name, place in PLACES.items():
        again = trained(place, update, tmp_path)
        assert again[0] == losses, name
        assert equal(again[1], weights), name
