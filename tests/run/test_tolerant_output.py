"""Output that cannot be written does not end a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain import cli
from megatrain.cli import TolerantOutput
from megatrain.run import training


class _Failing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_lost_output_is_told_once_and_a_closed_pipe_ends_the_run() -> None:
    told: list[str] = []
    output: Any = TolerantOutput(_Failing(OSError(28, "No space left on device")), told.append)
    console = Console(file=output)
    for _ in range(3):
        console.print("step 1")
    assert told == ["output cannot be written (No space left on device); the run goes on without it"]
    written = io.StringIO()
    output = TolerantOutput(written, told.append)
    Console(file=output).print("step 2")
    assert (written.getvalue(), len(told)) == ("step 2\n", 1)
    with pytest.raises(BrokenPipeError):
        TolerantOutput(_Failing(BrokenPipeError(32, "Broken pipe")), told.append).write("step 1")


def test_a_run_goes_on_when_its_log_is_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def training_of(config: object, console: Console) -> Path:
        console.print("step 1")
        done.append("trained")
        return tmp_path

    monkeypatch.setattr(training, "run_training", training_of)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", _Failing(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")])
    assert (left.value.code, done) == (0, ["trained"])
    assert capsys.readouterr().err.startswith("output cannot be written (No space left on device)")
