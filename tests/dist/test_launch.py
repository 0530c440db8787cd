"""When a rank fails, the user sees what it said, without torchrun's report of forty lines."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from megatrain.dist.launch import NO_MESSAGE, distinct, launch
from megatrain.errors import RankError
from tests.fork_server import Child, Preloaded

MEMBER = """
import os, pathlib, signal, sys, time
from megatrain import cli
from megatrain.errors import ConfigError
def fail(*arguments, **options):
    raise ConfigError("is missing", where="data", fix="give it")
if sys.argv[1] == "common":
    cli.app = fail
    cli.main()
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
if sys.argv[1] == "refused" and os.environ["RANK"] == "1":
    sys.exit("error: so and so")
if sys.argv[1] == "killed" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(sys.argv[2], os.environ["RANK"]).touch()
time.sleep(0 if sys.argv[1] == "ends" else 60)
"""


def two_ranks(*arguments: str) -> None:
    try:
        status = launch(2, "member", *arguments, tell=lambda line: print(f"error: {line}"))
    except RankError as error:
        print(error)
        status = 2
    raise SystemExit(status)


def started(preloaded: Preloaded, what: str, folder: Path) -> Child:
    (folder / "member.py").write_text(MEMBER)
    return preloaded.start(two_ranks, what, str(folder), environment={"PYTHONPATH": str(folder)})


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("ends", 0, ""),
        ("refused", 1, "error: so and so\n"),
        ("common", 2, "error: data: is missing; give it\n"),
        ("killed", 2, r"rank 1, process \d+: was ended by SIGKILL\n"),
    ],
)
def test_the_end_of_ranks_is_told_by_them_alone(
    what: str, status: int, said: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    child = started(preloaded, what, tmp_path)
    assert child.wait() == status, child.said
    assert re.fullmatch(said, child.said)


def test_an_error_that_other_ranks_quote_is_told_with_its_rank() -> None:
    said = ["rank 1 of 2, at the plan: data: is missing", "data: is missing", NO_MESSAGE, "disk: is full"]
    assert distinct([*said, *said]) == [said[0], said[3]]


def test_ctrl_c_reaches_the_ranks_and_leaves_no_traceback(preloaded: Preloaded, tmp_path: Path) -> None:
    child = started(preloaded, "waits", tmp_path)
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert child.poll() is None, child.said
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert (child.wait(), child.said) == (130, "")
