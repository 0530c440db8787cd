"""Asks the Hugging Face Hub about a model or a data set: one request, without retries and with a short timeout.

If the Hub cannot be reached, the libraries retry for half a minute, and their timeouts do not cover a DNS server that
does not answer. So a name is looked up here before a library loads it.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import ModelError, first_line
from megatrain.system.paths import usable_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 5.0
"""How long the Hub may take to answer, including DNS and proxies."""

SERVER_ERROR = 500


def ask_hub(request: Callable[[HfApi], Any]) -> Any:
    """The result of `request`, which is called with a client. Raises what it raises, or `TimeoutError`."""
    import huggingface_hub

    answers: list[Any] = []
    failed: list[Exception] = []

    def call() -> None:
        try:
            answers.append(request(huggingface_hub.HfApi()))
        except Exception as error:  # the client's errors have no other common base
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    if failed:
        raise failed[0]
    if not answers:
        raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s")
    return answers[0]


def refuse_absent_model(name: str, where: str, revision: str | None = None, known: Iterable[str] = ()) -> None:
    """Raise `ModelError` for a name that is no local path and that neither the local cache nor the Hub has.

    known: names on the Hub of which it suggests similar ones, beside what is on this machine.
    """
    if is_cached(name, ("config.json", "adapter_config.json"), revision):
        return
    is_reachable, reason = look_up_model(name)
    near = nearest_names(name, known) if reason else []
    similar = f"did you mean {' or '.join(near)}?" if near else ""
    if not is_reachable:
        version = f" at revision {revision}" if revision else ""
        what = f"neither a local folder nor in the local cache{version}, and the Hugging Face hub is unreachable"
        what += f" ({reason})"
        fix = similar or "give a local Hugging Face folder, or correct the name or the network"
        raise ModelError(what, where=where, fix=fix)
    if reason:
        raise ModelError(reason, where=where, fix=similar or "correct the name, or log in with `hf auth login`")


def is_cached(name: str, files: Iterable[str], revision: str | None = None) -> bool:
    """Whether the local cache has one of these files of a model on the Hub."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)


def nearest_names(name: str, known: Iterable[str] = ()) -> list[str]:
    """Similar names among files beside `name`, models in the local cache, and `known` names on the Hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    path = usable_path(name)
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, names_in(path.parent), 2, 0.7)]
    cached = [entry for entry in names_in(HF_HUB_CACHE) if entry.startswith("models--")]
    names = [entry.removeprefix("models--").replace("--", "/") for entry in cached]
    return [*near, *difflib.get_close_matches(name, dict.fromkeys([*names, *known]), n=2, cutoff=0.6)]


def names_in(folder: str | Path) -> list[str]:
    """Names in a folder; empty if it does not exist or cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def holds_weights(folder: str | Path) -> bool:
    """Whether a folder exists and has a file of a model's weights."""
    return any(name.endswith((".safetensors", ".bin")) for name in names_in(folder))


@cache
def look_up_model(name: str) -> tuple[bool, str]:
    """Whether the Hub answers about a model, and why it has none of this name, in a line; empty if it may have one."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        ask_hub(lambda api: api.model_info(name, timeout=TIMEOUT_SECONDS))
    except GatedRepoError:  # a kind of the next
        return True, ""
    except RepositoryNotFoundError:
        return True, "the Hugging Face hub has no model of this name, or keeps it private"
    except HfHubHTTPError as error:
        is_reachable = error.response.status_code < SERVER_ERROR
        return is_reachable, "" if is_reachable else first_line(error)
    except Exception as error:  # the client's network errors have no other common base
        return False, str(error) if isinstance(error, TimeoutError) else first_line(error)
    return True, ""
