"""The command line: what it answers, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatrain import cli
from megatrain.errors import NonFinite

SLOW = ("torch", "transformers", "numpy", "pydantic", "rich", "numba")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `megatrain ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_help_names_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "train" in out


def test_help_loads_no_slow_library() -> None:
    code = f"import sys\nfrom megatrain import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n" \
           f"assert not {set(SLOW)!r} & set(sys.modules), set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "megatrain", "trian"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: no verb is called 'trian'; did you mean 'train'?\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trian",), "no verb is called 'trian'; did you mean 'train'?"),
        (("zzz",), "no verb is called 'zzz'; the verbs are train"),
        (("train",), "megatrain train: which CONFIG?; try configs/quickstart.yaml"),
        (("train", "--what"), "No such option: --what"),
        (("train", "absent.yaml"), "absent.yaml: no such file"),
        (("train", "configs/quickstart.yaml", "train.stps=1"), "did you mean train.steps?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_every_key_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", "--keys")
    assert code == 0
    assert "train.lr = 0.0003\n    Peak learning rate.\n" in out
    assert "train.steps  (required)\n" in out


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (NonFinite("3 steps in a row\nnot finite", where="step 7"), 2, "error: step 7: 3 steps in a row not finite\n"),
        (KeyboardInterrupt(), 130, ""),
        (None, 0, ""),
    ],
)
def test_how_a_run_ends_decides_the_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    raised: BaseException | None,
    code: int,
    err: str,
) -> None:
    from megatrain import run as wiring

    def training(config: object, console: object) -> Path:
        if raised is not None:
            raise raised
        return tmp_path

    monkeypatch.setattr(wiring, "run_training", training)
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    found = run(capsys, "train", str(quickstart))
    assert (found[0], found[2]) == (code, err)


def test_what_a_model_leaves_out_of_its_files_is_told_beside_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from megatrain.data import load_tokenizer
    from tests.tiny import tiny_model

    source, target = tmp_path / "model", tmp_path / "written"
    tiny_model(vocab_size=300, eos_token_id=256).save_pretrained(source)
    load_tokenizer("bytes").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "vision.proj": torch.zeros(1)}, source / "model.safetensors", {"format": "pt"})
    capsys.readouterr()  # the library's own bar
    notice = "left out: 1 tensor in its files that the model does not use: vision.proj\n"
    code, out, err = run(capsys, "export", str(source), str(target))
    assert (code, out, err) == (0, f"{target}\n", notice)
    code, out, err = run(capsys, "generate", str(source), "--max-new-tokens", "2")
    assert code == 0
    assert "left out" not in out
    assert err.startswith(notice)
    assert run(capsys, "generate", str(target), "--max-new-tokens", "2")[2].count("\n") == 1
    code, less, _ = run(capsys, "generate", str(target), "--max-new-tokens", "2", *PASSING)
    assert (code, less) == (0, out)
    assert "use 0, since nothing is fetched here" in run(capsys, "generate", str(target), *PASSING[2:])[2]


PASSING = ("--device", "sim:1", "--weights-memory", "1MiB")


def test_a_probe_is_written_where_plan_and_train_look_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain import machine, probe
    from megatrain.plan import machine as described

    monkeypatch.setattr(machine, "PROBED", tmp_path / "found" / "hardware.json")
    monkeypatch.setattr(probe, "probe", lambda *_, **__: described("laptop"))
    assert run(capsys, "probe")[0] == 0
    assert machine.probed_machine() == described("laptop")
    other = tmp_path / "other.json"
    assert str(other) in run(capsys, "probe", "--output", str(other))[1]
    assert other.exists()


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain import config

    def broken(path: str, overrides: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(config, "load_config", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "x.yaml"])
