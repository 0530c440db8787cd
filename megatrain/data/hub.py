"""Asks the Hugging Face hub about data sets and tokenizers: once, within a few seconds.

If the hub cannot be reached, the libraries retry for half a minute, and their timeouts do not cover a DNS server that
does not answer. So a name is looked up here before a library loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import DataError, first_line
from megatrain.system.paths import nearest_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 5.0
"""How long the hub may take to answer, including DNS and proxies."""


def answer(ask: Callable[[HfApi], Any]) -> Any:
    """The hub's answer to `ask`, which is called with a client. Raises what `ask` raises, or `TimeoutError`."""
    import huggingface_hub

    found: list[Any] = []
    failed: list[Exception] = []

    def call() -> None:
        try:
            found.append(ask(huggingface_hub.HfApi()))
        except Exception as error:  # the client's errors have no common base but this
            failed.append(error)

    asking = threading.Thread(target=call, daemon=True)
    asking.start()
    asking.join(TIMEOUT_SECONDS)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s")
    return found[0]


def commit_of(name: str) -> str:
    """The latest commit of a data set. Raises as `answer` does."""
    info = answer(lambda api: api.dataset_info(name, timeout=TIMEOUT_SECONDS))
    return str(info.sha)


def commit_or_download(name: str) -> str | None:
    """The latest commit of a data set, or `None` if the hub does not provide it but an earlier download exists.

    Raises `DataError` if there is neither.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return commit_of(name)
    except Exception as error:
        if is_downloaded(name):
            return None
        nearest = nearest_path(Path(name))
        what = "neither a local file nor an earlier download, and the Hugging Face hub did not provide it"
        what, fix = f"{what} ({first_line(error)})", "name a local file or folder"
        if isinstance(error, RepositoryNotFoundError):
            what = "the Hugging Face hub has no data set of this name, or keeps it private"
            fix = "correct the name, or log in with `hf auth login`"
        raise DataError(what, where=name, fix=f"did you mean {nearest}?" if nearest else fix) from error


def is_downloaded(name: str) -> bool:
    """Whether the cache of `datasets` may hold `name`, without importing `datasets`, which takes seconds."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME, "datasets")
    return folder.is_dir() and any(_letters(each.name) == _letters(name) for each in folder.iterdir())


def _letters(name: str) -> str:
    """What `Org/TinyTexts` has in common with the name of its folder, `Org___tiny_texts`."""
    return name.replace("/", "").replace("_", "").lower()
