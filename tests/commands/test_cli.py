"""The command line: what it answers, and with which exit code."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer.main
from typer.models import ArgumentInfo

import megatrain
from megatrain import cli
from megatrain.errors import NonFinite
from tests import before_torch_import
from tests.bad_paths import FOR_A_FILE, FOR_A_FOLDER, KINDS, bad_path
from tests.fake_hub import ADDRESS, Hub

SLOW = ("torch", "transformers", "numpy", "pydantic", "rich", "numba")


@pytest.fixture(autouse=True, scope="module")
def _parser_made_once() -> Iterator[None]:
    """And not for each command line: that reads the annotations of all verbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", cache(typer.main.get_command))
        yield


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `megatrain ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "train" in out


def test_version_lists_the_libraries_that_affect_numerics(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--version")
    python, torch, transformers = platform.python_version(), version("torch"), version("transformers")
    assert out == f"megatrain {megatrain.__version__} (torch {torch}, transformers {transformers}, python {python})\n"
    assert (code, err) == (0, "")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_slow_library(option: str) -> None:
    code = f"import sys\nfrom megatrain import cli\ntry: cli.main([{option!r}])\nexcept SystemExit: pass\n" \
           f"assert not {set(SLOW)!r} & set(sys.modules), set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=240)


@pytest.mark.parametrize("verb", [(), *((each.name,) for each in cli.app.registered_commands)], ids=str)
def test_help_is_whole_and_shows_optional_arguments_once(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *verb, "--help")
    assert code == 0
    assert "[[" not in out
    assert "......" not in out
    if not verb:
        assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("module", ["typer", "megatrain.errors", "atexit"])
def test_ctrl_c_during_the_imports_ends_quietly(module: str) -> None:
    """With no traceback, wherever the imports are."""
    code = (
        "import sys, runpy\n"
        "class Interrupted:\n"
        "    def find_spec(name, *rest):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        f"sys.meta_path.insert(0, Interrupted); sys.modules.pop({module!r}, None)\n"
        "runpy.run_module('megatrain', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_is_the_one_that_runs_as_a_module() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"megatrain": "megatrain.__main__:main"}


def test_generate_export_and_verify_tell_mistakes_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "runs" / "chat").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    absent = "model runs/chta: no such folder or file; did you mean runs/chat? "
    absent += "for the hub's, start in another directory"
    told = {
        "generate runs/chta --prompt x": absent,
        "export runs/chta out": absent,
        "verify runs/chta": absent,
        "export runs/chat old": "old: already holds a model; use another folder, or --overwrite",
        "export runs/chat out --precision fp16": "--precision: unknown precision 'fp16'; use bf16 or fp32",
        "generate runs/chat --system x": "--system: needs --chat; add --chat",
    }
    assert before_torch_import.told([*told], tmp_path, slow=["torch"]) == [f"error: {line}" for line in told.values()]


@pytest.mark.few(1)
@pytest.mark.parametrize("is_reachable", [False, True])
def test_a_typo_in_a_hub_name_is_told_with_the_near_name_before_torch_is_imported(
    tmp_path: Path, is_reachable: bool
) -> None:
    (tmp_path / "chats.txt").write_text("hello")
    run: dict[str, object] = {"model": {"path": "gpt2"}}
    run |= {"data": {"sources": ["chats.txt"], "tokenizer": "bytes", "sequence_length": 8}}
    (tmp_path / "run.yaml").write_text(
        json.dumps({**run, "train": {"steps": 1}, "output": {"folder": "run", "trackers": []}})
    )
    typo = "qwen/Qwen3-8"
    commands = [f"generate {typo}", f"export {typo} out", f"train run.yaml model.path={typo}"]
    commands += [f"train run.yaml model.path=null model.config=made.json data.tokenizer={typo}"]
    (tmp_path / "made.json").write_text(json.dumps({"model_type": "llama"}))
    code = """
import sys
from megatrain import cli
for command in sys.argv[1:]:
    try:
        cli.main(command.split())
    except SystemExit as left:
        assert left.code == 2, left.code
assert "torch" not in sys.modules
"""
    with Hub() as hub:
        endpoint = hub.endpoint if is_reachable else f"{ADDRESS}:9"
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", code, *commands]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        asked = [each for each in hub.asked if "harness" not in each]
    why = "hub has no model of this name" if is_reachable else "Connection refused"
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands), done.stderr
    for line in lines:
        assert line.startswith((f"error: model {typo}: ", f"error: tokenizer {typo}: "))
        assert why in line
        assert "did you mean Qwen/Qwen3-8B" in line
    assert lines[-1].startswith("error: tokenizer")
    assert asked == [f"GET /api/models/{typo}"] * is_reachable


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "megatrain", "trian"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (2, "error: unknown command 'trian'; did you mean 'train'?\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trian",), "unknown command 'trian'; did you mean 'train'?"),
        (("zzz",), "unknown command 'zzz'; the commands are train"),
        (("train",), "megatrain train: CONFIG is missing; write one with `megatrain init`"),
        (("train", "--what"), "No such option: --what"),
        (("train", "absent.yaml"), "absent.yaml: no such file"),
        (("train", "configs/quickstart.yaml", "train.stps=1"), "did you mean train.steps?"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


PATH = "<path>"
WITH_PATHS: list[tuple[tuple[str, ...], str, dict[str, str]]] = [
    (("train", PATH), "CONFIG", {}),
    (("init", PATH, "--model", "m", "--data", "d"), "FILE", FOR_A_FILE),
    (("init", "x.yaml", "--model", PATH, "--data", "d"), "--model", {}),
    (("init", "x.yaml", "--model", "m", "--data", PATH), "--data", {}),
    (("init", "x.yaml", "--hardware", PATH), "--hardware", {}),
    (("init", "x.yaml", "--folder", PATH), "--folder", FOR_A_FOLDER),
    (("init", "x.yaml", "--disk", PATH), "--disk", FOR_A_FOLDER),
    (("init", "x.yaml", "--from", PATH), "--from", {}),
    (("plan", PATH), "MODEL", {}),
    (("plan", "m", "--hardware", PATH), "--hardware", {}),
    (("plan", "m", "--trace", PATH), "--trace", FOR_A_FILE),
    (("plan", "m", "--json", PATH), "--json", FOR_A_FILE),
    (("verify", PATH), "MODEL", {}),
    (("generate", PATH), "FOLDER", {}),
    (("generate", "m", "--base", PATH), "--base", {}),
    (("export", PATH, "t"), "SOURCE", {}),
    (("export", "m", PATH), "TARGET", FOR_A_FOLDER),
    (("export", "m", "t", "--merge", "--base", PATH), "--base", {}),
    (("probe", "--path", PATH), "--path", FOR_A_FOLDER),
    (("probe", "--output", PATH), "--output", FOR_A_FILE),
]
NO_PATHS = (
    "system",
    "overrides",
    "prompt",
    "adapter",
    "optimizer",
    "precision",
    "device",
    "attention",
    "device_memory",
    "host_memory",
    "disk_memory",
)


@pytest.mark.few(12)
@pytest.mark.parametrize(("arguments", "where", "kinds"), WITH_PATHS, ids=lambda value: str(value)[:40])
def test_unusable_paths_are_refused_in_every_argument(
    arguments: tuple[str, ...],
    where: str,
    kinds: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (kind, says) in enumerate({**KINDS, **kinds}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as locked:
            path = bad_path(kind, folder, locked)
            code, out, err = run(capsys, *(path if each == PATH else each for each in arguments))
        assert (code, out) == (2, ""), kind
        assert err.startswith(f"error: {where}: "), kind
        assert says in err, kind
        assert err.count("\n") == 1, kind
        assert len(err) < 600, kind


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "m", "--temperature", "1e-300"), "temperature 1e-300 is out of range; give 0, or a number"),
        (("generate", "m", "--temperature", "inf"), "temperature inf is out of range"),
        (("generate", "m", "--seed", str(10**30)), "is out of range; give a number from 0 to 2**63 - 1"),
        (("probe", "--seconds", "1e300"), "--seconds"),
        (("init", "x.yaml", "--model", "m", "--data", "d", "--steps", str(10**30)), "--steps"),
    ],
)
def test_unreasonable_numbers_are_refused(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert says in err
    assert len(err) < 400


def test_every_path_argument_is_covered() -> None:
    tried = {(arguments[0], where) for arguments, where, _ in WITH_PATHS}
    for command in cli.app.registered_commands:
        assert command.callback is not None
        for name, kind in get_type_hints(command.callback, include_extras=True).items():
            if name == "return" or name in NO_PATHS or "str" not in str(kind):
                continue
            said = get_args(kind)[1]
            named = said.default if str(said.default).startswith("--") else f"--{name}"  # typer reads it there
            where = said.metavar if isinstance(said, ArgumentInfo) else named
            assert (command.name, where) in tried


def test_every_key_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", "--keys")
    assert code == 0
    assert (
        "train.learning_rate = 0.0003    [number of 0 or more]\n    Peak learning rate; 1e-4 by default for lion.\n"
        in out
    )
    assert "data.sources  (required)    [list of: text]\n" in out
    assert "train.epochs = null    [" in out


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (NonFinite("3 steps in a row\nnot finite", where="step 7"), 2, "error: step 7: 3 steps in a row not finite\n"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "error: out of memory: the system gave no more; free some, or raise the process's limit\n"),
        (RuntimeError("can't start new thread"), 2, "error: the system starts no more threads; end other processes, or "
         "raise their limit (ulimit -u, pids)\n"),
        (None, 0, ""),
    ],
)  # fmt: skip
def test_the_exit_code_follows_how_the_run_ended(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    raised: BaseException | None,
    code: int,
    err: str,
) -> None:
    from megatrain.run import training as wiring

    def training(config: object, console: object) -> Path:
        if raised is not None:
            raise raised
        return tmp_path

    monkeypatch.setattr(wiring, "run_training", training)
    monkeypatch.chdir(tmp_path)  # a clone whose quickstart has run holds one
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    found = run(capsys, "train", str(quickstart))
    assert (found[0], found[2]) == (code, err)


def test_missing_weights_are_reported_beside_the_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from megatrain.data.tokenizer import load_tokenizer
    from tests.tiny import tiny_model

    source, target = tmp_path / "model", tmp_path / "written"
    tiny_model(vocab_size=300, eos_token_id=256).save_pretrained(source)
    load_tokenizer("bytes").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "vision.proj": torch.zeros(1)}, source / "model.safetensors", {"format": "pt"})
    capsys.readouterr()  # the library's own bar
    notice = "copied unchanged: 1 tensor is not loaded: vision.proj\n"
    code, out, err = run(capsys, "export", str(source), str(target))
    assert (code, out, err) == (0, f"{target}\n", notice)
    code, _, err = run(capsys, "export", str(source), str(target), "--precision", "fp32")
    assert (code, err) == (2, f"error: {target}: already holds a model; use another folder, or --overwrite\n")
    code, _, err = run(capsys, "export", str(source), str(target), "--overwrite")
    assert (code, err) == (0, f"replacing the model in {target}\n{notice}")
    code, out, err = run(capsys, "generate", str(source), "--max-new-tokens", "2")
    assert code == 0
    assert "left out" not in out
    said = notice.replace("copied unchanged", "left out")
    assert err.startswith(said)
    assert run(capsys, "generate", str(target), "--max-new-tokens", "2")[2].startswith(said), "the export has it, too"


@pytest.fixture
def asks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` compares what a run does by itself, and `plan` looks at nothing beside the plan."""
    from megatrain.plan import analysis
    from megatrain.train import parity

    monkeypatch.setattr(parity, "full_settings", parity.short_settings)
    monkeypatch.setattr(analysis, "changes", lambda *_: ())


@pytest.mark.usefixtures("asks_little")
def test_verify_and_export_name_nonfinite_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    from tests.tiny import tiny_model

    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
        model.model.norm.weight[0] = float("inf")
    model.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    code, out, _ = run(capsys, "verify", str(tmp_path / "model"))
    names = "model.layers.1.mlp.up_proj.weight, model.norm.weight"
    assert code == cli.MISMATCH
    assert f"weights that are not finite: {names}\n" in out
    code, _, err = run(capsys, "export", str(tmp_path / "model"), str(tmp_path / "out"))
    assert (code, err) == (0, f"written unchanged, although some weights of the source are not finite: {names}\n")


def test_plan_and_train_find_the_saved_probe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.commands import probe
    from megatrain.plan import machine as described
    from megatrain.run import this_machine

    monkeypatch.setattr(this_machine, "PROBED", tmp_path / "found" / "hardware.json")
    monkeypatch.setattr(probe, "probe", lambda *_, **__: described("laptop"))
    assert run(capsys, "probe")[0] == 0
    assert this_machine.probed_machine() == described("laptop")
    other = tmp_path / "other.json"
    assert str(other) in run(capsys, "probe", "--output", str(other))[1]
    assert other.exists()


def test_internal_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain import config

    def broken(path: str, overrides: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(config, "load_config", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "x.yaml"])


@pytest.mark.usefixtures("asks_little")
def test_verbs_that_take_a_model_accept_a_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.run.test_training import configuration, train

    train(configuration(tmp_path, train={"steps": 1, "sample_tokens": 0}, output={"verify_export": False}))
    folder = tmp_path / "run"
    for words in (("generate", "--max-new-tokens", "2"), ("export", str(tmp_path / "out")), ("verify",), ("plan",)):
        verb, *rest = words
        code, _, err = run(capsys, verb, str(folder), *rest)
        assert (code, "error" in err) == (0, False), (verb, err)
    model = {"path": str(folder), "config": None}
    onward = configuration(tmp_path, output={"folder": str(tmp_path / "on"), "verify_export": False})
    short = onward.train.model_copy(update={"steps": 1, "sample_tokens": 0})
    train(onward.model_copy(update={"model": onward.model.model_copy(update=model), "train": short}))
    for path in sorted((folder / "model").rglob("*")):
        path.unlink()
    for verb in ("generate", "verify", "plan"):
        code, _, err = run(capsys, verb, str(folder))
        newest = folder / "checkpoints" / "step-00000001"
        told = f"error: model {folder}: is a run that has not saved a model yet; use its newest checkpoint, {newest}\n"
        assert (code, err) == (2, told)


def test_unverified_kernels_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.tiny import tiny_model

    tiny_model().save_pretrained(tmp_path)
    capsys.readouterr()
    has_not = "LlamaForCausalLM cannot use attention={}"
    for kernel, told in (
        ("foo", has_not),
        ("flash_attention_2", has_not),
        ("flex_attention", "is compared on the CPU, which has no attention={}; use attention=eager or sdpa"),
    ):
        code, out, err = run(capsys, "verify", str(tmp_path), "--attention", kernel)
        assert (code, out) == (2, "")
        assert told.format(kernel) in err


def test_a_system_prompt_without_a_chat_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", "anything", "--system", "be brief"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: --system: needs --chat; add --chat\n"


@pytest.mark.slow
def test_a_command_ends_without_a_word_of_what_its_libraries_have_not_collected() -> None:
    """Those of triton, which training and the measuring of models import, list as leaks what is there at the end."""
    pytest.importorskip("triton")
    code = "import torch, triton._C.libtriton; from megatrain.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
