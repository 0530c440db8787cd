"""Looks up data sets on the Hugging Face Hub: the latest commit, or whether there is an earlier download."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from megatrain.errors import DataError, first_line
from megatrain.system import hub_client
from megatrain.system.paths import nearest_path


@cache
def commit_or_download(name: str) -> str | None:
    """The latest commit of a data set, or `None` if the hub does not provide it but an earlier download exists.

    A process looks up a data set once, so it checks, caches and reads the same commit. Raises `DataError` if there is
    neither.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return str(hub_client.ask_hub(lambda api: api.dataset_info(name, timeout=hub_client.TIMEOUT_SECONDS)).sha)
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
