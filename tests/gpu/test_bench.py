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
    ours, plain = (found["parts"][f"tiny {name}"] for name in (gpu.STREAMED, "plain"))
    assert not ours["why"], ours
    assert not plain["why"], plain
    assert ours["loss"] == pytest.approx(plain["loss"], rel=2e-2)
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
