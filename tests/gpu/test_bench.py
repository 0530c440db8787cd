"""On a GPU: the benchmark runs from end to end, goes on where it stopped, and says what it could not measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # contenders' libraries warn as they like


def test_a_dry_run_measures_every_available_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry", "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"].keys() == {f"tiny {contender}" for contender in gpu.CONTENDERS}
    ours, fused, plain = (found["parts"][f"tiny {name}"] for name in (gpu.STREAMED, gpu.FUSED, "plain"))
    for each in (ours, fused, plain):
        assert not each["why"], each
        assert each["loss"] == pytest.approx(plain["loss"], rel=2e-2)
    assert ours["busy"]["FORWARD"][0] > 0
    assert ours["busy"].keys() == found["parts"][f"tiny {gpu.IN_24_GB}"]["busy"].keys()  # tiny fits either way
    assert ours["planned_seconds"] > 0
    assert ours["planned_device_nbytes"] > 0
    for part in found["parts"].values():
        assert part["why"] or part["tokens_per_second"] > 0
        assert part["contender"] in told
    assert gpu.main(words) == 0
    assert "tokens/s" not in capsys.readouterr().out  # all of it is there
    found["machine"]["gpu"] = "another"
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert "use another --out, or --again" in capsys.readouterr().err
    assert json.loads((tmp_path / "gpu.json").read_text()) == found


def test_the_fields_cases_run_with_their_shapes_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By contender, so that the most telling come first; others than the engine have no limit of device memory."""
    words = ["--field", "--dry", "--out", str(tmp_path), "--contenders", f"{gpu.FUSED},{gpu.ZERO}"]
    assert gpu.main(words) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    ours = [f"tiny {gpu.FUSED}", f"tiny in 1 GiB {gpu.FUSED}"]
    assert list(parts) == [*ours, f"tiny {gpu.ZERO}"]
    assert not any(parts[name]["why"] for name in ours), parts
    assert [parts[name]["tokens_per_step"] for name in ours] == [128, 128]
    assert "deepspeed zero-3 offload: " in capsys.readouterr().out


def test_the_fields_sizes_are_the_published_models() -> None:
    billions = {name: size.parameters / 1e9 for name, size in gpu.FIELD.items()}
    expected = {"Qwen2.5-1.5B": 1.54, "Qwen2.5-7B": 7.6, "8B in 67 GiB": 8.0, "8B in 8.8 GiB": 8.0, "Qwen2.5-14B": 14.8}
    assert billions == pytest.approx(expected, rel=0.01)
    assert {size.tokens for name, size in gpu.FIELD.items() if size.kind == "qwen2"} == {1024 * 512}
    assert {size.tokens for name, size in gpu.FIELD.items() if size.kind == "llama"} == {262144}
