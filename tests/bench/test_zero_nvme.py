"""The comparison with DeepSpeed at a tiny size, its side left out, and the ratios of figures that are made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import zero_nvme
from bench.shapes import llama_shape
from megatrain.plan.machines import save_hardware
from megatrain.spec import Hardware

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.slow
def test_our_side_runs_and_the_result_is_json(tmp_path: Path) -> None:
    settings = {"shape": TINY, "rows": 2, "length": 16, "precision": "fp32", "folder": str(tmp_path), "hardware": None}
    result = json.loads(json.dumps(zero_nvme.compare(settings, [zero_nvme.PLAIN], turns=2, python="")))
    found = result["contenders"]["megatrain"]
    assert list(tmp_path.iterdir()) == []
    assert result["ratios"]["megatrain"]["plain"]["losses_apart"] < 1e-6
    assert found["products_seconds"] > 0
    assert len(found["seconds"]) == 2
    assert found["tokens_per_second"] > 0
    assert found["losses"][0] > found["losses"][-1]
    assert 0 < found["above_start_nbytes"] < found["peak_nbytes"]
    assert found["nbytes_by_tier"]["disk"] >= 16 * found["parameters"]
    assert "megatrain" in zero_nvme.show(result)


def test_a_plan_for_half_the_memory_stays_within_it(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    save_hardware(Hardware("a machine", 1 << 34, 1 << 34, 1e10, 1e10, 1e11, 1e10, shares_memory=True), machine)
    settings = {"rows": 2, "length": 16, "precision": "fp32", "hardware": str(machine)}
    spec = llama_shape("llama", 4, width=64, vocabulary=512)
    lavish, tight = (zero_nvme.planned(spec, settings, tmp_path, nbytes) for nbytes in (1 << 30, 1 << 22))
    assert tight.nbytes["host"] <= zero_nvme.COUNTED * (1 << 22) < lavish.nbytes["host"]
    told = zero_nvme.headline(tight)
    assert (
        told["units_with_their_on_disk"]["moments"]
        > 0
        == sum(zero_nvme.headline(lavish)["units_with_their_on_disk"].values())
    )
    assert json.dumps(told)


def test_a_dead_process_is_reported_with_its_log(tmp_path: Path) -> None:
    settings = {"shape": TINY, "rows": 1, "length": 16, "precision": "fp32", "folder": str(tmp_path / "none")}
    with pytest.raises(RuntimeError, match=r"megatrain has ended(.|\n)*none"):
        zero_nvme.compare(settings, [], turns=1, python="")


@pytest.mark.parametrize(
    ("seconds", "nbytes", "loss", "holds"),
    [
        (3.0, 20, 8.01, True),
        (2.8, 20, 8.01, False),
        (3.0, 19, 8.01, False),
        (3.0, 20, 8.1, False),
        (3.0, 20, math.nan, False),
    ],
)
def test_the_claim_is_of_speed_and_memory_at_the_same_losses(
    seconds: float, nbytes: int, loss: float, holds: bool
) -> None:
    losses = [8.0, loss]
    ours = {"seconds": [2.0, 2.0, 4.0], "losses": [8.0, 8.0], "peak_nbytes": 10, "above_start_nbytes": 4}
    theirs = {"seconds": [seconds, seconds, 2.0], "losses": losses, "peak_nbytes": nbytes, "above_start_nbytes": 16}
    found = zero_nvme.ratios(ours, theirs)
    assert found["holds"] == holds
    assert found["speed"] == seconds / 2
    assert found["memory_above_start"] == 0.25


def test_deepspeed_is_given_buffers_of_the_largest_parameter(tmp_path: Path) -> None:
    settings = {"rows": 4, "precision": "fp32"}
    for pipelined, buffers in ((False, 4), (True, 12)):
        config = zero_nvme.deepspeed_config(settings, tmp_path, tile=7, largest=24, pipelined=pipelined)
        zero = config["zero_optimization"]
        assert zero["offload_param"]["buffer_size"] == 24
        assert zero["offload_optimizer"]["buffer_count"] == buffers
        assert json.dumps(config)
