"""A name that is nowhere is refused in one line and soon, network or not; a path is never taken for a hub name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig

from megatrain.errors import ModelError
from megatrain.model import PretrainedSource, hub
from megatrain.model.architecture import read_config
from megatrain.model.weight_sources import load_causal_lm
from megatrain.system import hub_client
from tests.tiny import tiny_model

NAME = "nobody/nothing-here"


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    hub_client.look_up_model.cache_clear()


def test_without_a_network_hub_names_fail_quickly_and_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The library itself is as patient as it likes, and nobody listens at the address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    for ask in (lambda: read_config(NAME, where="here"), lambda: PretrainedSource(NAME), lambda: load_causal_lm(NAME)):
        began = time.monotonic()
        with pytest.raises(ModelError, match=r"neither a local folder nor in the local cache, and .* is unreachable"):
            ask()
        assert time.monotonic() - began < 30
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_an_unresponsive_hub_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = threading.Event()

    def model_info(api: Any, name: str, timeout: float) -> None:
        asked.append(name)
        answers.wait(120)  # in a resolver, say, that knows no timeout

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub_client, "TIMEOUT_SECONDS", 0.1)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"is unreachable \(no answer in 0.1 s\)"):
            read_config(NAME, where="here")
    assert time.monotonic() - began < 60
    answers.set()
    assert asked == [NAME]


@pytest.mark.parametrize(("status", "is_local"), [(200, False), (404, False), (503, True)])
def test_a_refusing_hub_counts_as_reachable(monkeypatch: pytest.MonkeyPatch, status: int, is_local: bool) -> None:
    def model_info(api: Any, name: str, timeout: float) -> None:
        if status != 200:
            error = HfHubHTTPError.__new__(HfHubHTTPError)  # whose HTTP library differs from version to version
            error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert hub.is_local(NAME) is is_local


def test_cached_models_are_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    cached = tmp_path / "models--nobody--nothing-here"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    tiny_model().save_pretrained(cached / "snapshots" / revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_client, "look_up_model", lambda name: (False, "no network"))
    assert read_config(NAME, where="here").model_type == "llama"
    assert len(PretrainedSource(NAME).model.state_dict()) > 4


@pytest.mark.parametrize(
    "source", ["./foo/bar", "../bar", "~/bar", "runs/foo", "runs/foo/bar", "/no/such", "foo.json", "foo/"]
)
def test_a_missing_path_is_not_a_hub_name(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(huggingface_hub.HfApi, "model_info")
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    with pytest.raises(ModelError, match="here: no such folder or file; ") as caught:
        read_config(source, where="here")
    assert ("the folder runs exists but has no foo" in str(caught.value)) == (source == "runs/foo")


@pytest.mark.parametrize("source", ["a b", "a//b", "--x"])
def test_invalid_hub_names_are_refused_without_a_request(source: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(source, where="here")
    assert "\n" not in str(caught.value)
