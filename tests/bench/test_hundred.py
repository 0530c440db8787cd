"""The run of any size: at a small one it follows the narrow model, goes on where it was cut off, and finds an error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bench import hundred
from bench.hundred import PARTS, Run, compared, main, results_in, run_part


def held(run: Run) -> dict[str, Any]:
    run.folder.mkdir()
    for name in PARTS:
        results = run_part(run, name)
    return results


def test_a_small_one_follows_the_narrow_model_and_an_error_in_one_row_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(1e6, tmp_path / "run", precision="fp32", times=2, clip=2.0)
    results = held(run)
    assert results["holds"]
    assert max(results["errors_of_losses"] + results["errors_of_norms"]) < 1e-5
    assert max(results["parts"]["narrow"]["norms"]) > 2.0, "clipping did something"
    assert all(nbytes > 0 for nbytes in results["parts"]["steps"]["written_nbytes"])
    parts = results["parts"]
    deeper = parts | {"files": {"parameters": 2 * parts["files"]["parameters"]}}
    grown = hundred.growth(parts, deeper)
    assert grown["steps: written_nbytes"] == 0.5, "the same bytes for twice the parameters"
    assert grown["resumed: peak_process_nbytes"] == 1.0
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a part ran again"))
    del results["asked"]["muon"]  # as before there was this option
    (run.folder / hundred.RESULTS).write_text(json.dumps(results))
    main(["--parameters", "1e6", "--folder", str(run.folder), "--precision", "fp32", "--times", "2", "--clip", "2.0"])
    assert "losses within" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is of another run"):
        results_in(replace(run, muon=True))
    (file,) = (run.folder / "export").glob("*.safetensors")
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for factor in (1.01, float("nan")):
        weights[name][-1] *= factor
        save_file(weights, file)
        found = compared(run, run.folder / "export", 3)
        assert (found["worst"], found["farthest"], found["to_rounding"] > 1) == (name, name, True)


def test_a_checkpoint_of_the_narrow_models_numbers_is_that_which_two_steps_lead_to(tmp_path: Path) -> None:
    stepped, known = (
        Run(1e6, tmp_path / name, precision="fp32", times=2, known_checkpoint=name == "known")
        for name in ("two", "known")
    )
    losses = [held(run)["parts"]["resumed"]["losses"] for run in (stepped, known)]
    assert results_in(known)["holds"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for pattern in ("*.safetensors", "optimizer/*.safetensors"):
        one, other = (
            {
                name: value
                for file in run.folder.glob(f"checkpoints/step-*/{pattern}")
                for name, value in load_file(file).items()
            }
            for run in (stepped, known)
        )
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value - other[name]).norm() <= 1e-4 * value.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"precision": "fp32", "experts": 4},
        {"precision": "bf16", "experts": 4},
        {"precision": "fp32", "experts": 4, "known_checkpoint": True},
        {"precision": "fp32", "experts": 4, "muon": True, "clip": 1.0},
        {"muon": True},
        {"lora": True},
        {"clip": 1.0},
        {"clip": 1.0, "known_checkpoint": True},
    ],
    ids=str,
)
def test_so_do_mixtures_adapters_and_muon(asked: dict[str, Any], tmp_path: Path) -> None:
    assert held(Run(4e6, tmp_path / "run", **asked, times=2))["holds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "asked"),
    [(2e7, {"times": 4}), (2e7, {"times": 4, "experts": 4}), (2e6, {"times": 2, "muon": True})],
    ids=str,
)
def test_rounding_does_not_explain_that_a_matrix_of_one_layer_has_missed_a_step(
    parameters: float, asked: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(parameters, tmp_path / "run", **asked)
    held(run)
    (file,) = (run.folder / "export").glob("*.safetensors")
    weights = load_file(file)
    (step,) = (run.folder / "checkpoints").glob("step-*")
    earlier = {name: value for each in step.glob("model*.safetensors") for name, value in load_file(each).items()}
    for name in (name for name in weights if name.startswith("model.layers.1.") and weights[name].dim() == 2):
        save_file(weights | {name: earlier[name].to(weights[name].dtype)}, file)
        found = compared(run, run.folder / "export", 3)
        assert (found["farthest"], found["to_rounding"] > 1) == (name, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_billion_parameters_follow_the_narrow_model(tmp_path: Path) -> None:
    """All 12 GB of state on the disk, and no more of it in memory than a few layers' pieces."""
    command = [sys.executable, "-m", "bench.hundred", "--parameters", "1e9", "--folder", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    results = json.loads((tmp_path / hundred.RESULTS).read_text())
    assert results["holds"]
    assert results["parts"]["files"]["parameters"] == pytest.approx(1e9, rel=0.05)
    assert results["parts"]["steps"]["peak_process_nbytes"] < 2.5e9
