"""Where a model is that a user names: in a folder that can be read, in that of a run, or on the Hugging Face hub.

Whether the hub can be asked is found out once and soon.

The library asks a hub that is out of reach again and again, for half a minute, and prints a line each time. So it is
asked here first, one time and with little patience; where it does not answer, the library is told to look on this
machine only. It leaves out tokenizers, which `data.tokenizer` looks up in the same way.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from megatrain.errors import ModelError, first_line
from megatrain.system.paths import (
    read_json,
    refuse_absent_model,
    refuse_special,
    refuse_unreadable_in,
    usable_path,
)

ADAPTER = "adapter_config.json"
"""What peft writes in place of a config.json."""

PATIENCE_SECONDS = 2.5
"""How long the hub may take to answer, all names resolved and proxies passed."""

SERVER_ERROR = 500


def model_named(source: str | Path) -> str:
    """The model that a user's words stand for: of the folder of a run, the model in it; else the same words.

    Raises `ModelError` for a run that has not left a model yet, naming its newest checkpoint, and for a path that
    cannot be one.
    """
    folder = usable_path(source, where="model", error=ModelError)
    within = folder / "model"
    if (folder / "config.json").exists() or not folder.is_dir():
        return str(source)
    if any((within / name).exists() for name in ("config.json", ADAPTER)):
        return str(within)
    if (folder / "metrics.jsonl").exists():
        newest = max(folder.glob("checkpoints/step-*/*config.json"), default=None)
        fix = f"name its newest checkpoint, {newest.parent}" if newest else "name it when it has ended"
        raise ModelError("is a run that has left no model yet", where=f"model {source}", fix=fix)
    return str(source)


def is_local(source: str | Path) -> bool:
    """Whether to look for a model on this machine only: it is a path that exists, or the hub is out of reach."""
    return os.path.exists(source) or bool(_why_unreachable(str(source)))


def located(source: str | Path, *, where: str, revision: str | None = None) -> str:
    """What the library is to be given for `source`: a path that is there, with `~` expanded, or a hub name.

    Raises `ModelError` for a path that does not exist, for a folder that holds no model or files that never end, and
    for a hub name that neither cache nor hub can give. A path is what no hub name looks like (`./a`, `a/b/c`,
    `a.json`), and `a/b` where there is a folder `a`.
    """
    path, text = usable_path(source, where="model", error=ModelError), str(source)
    if not path.exists():
        refuse_absent_model(text, where)
        _refuse_absent(text, where, revision)
        return text
    try:
        refuse_special(path)
        if path.is_dir():
            refuse_unreadable_in(path)
    except OSError as error:
        file = f"its file {Path(error.filename).name} is" if path.is_dir() else "is"
        what = f"{file} {error.strerror}"
        raise ModelError(what, where=where, fix="name the folder of a Hugging Face model, whole") from error
    if path.is_dir() and not (path / "config.json").exists():
        raise _no_model(path, where)
    return str(path)


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Where the hub's cache holds the files of the model called `name`, if it does."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _no_model(folder: Path, where: str) -> ModelError:
    """The error for a folder without a config.json, by what it holds instead."""
    if (folder / ADAPTER).exists():
        try:
            base = f" for {read_json(folder / ADAPTER)['base_model_name_or_path']}"
        except (OSError, ValueError, LookupError, TypeError):
            base = ""
        fix = "name that model, and this folder as its adapter; or merge them: megatrain export FOLDER OUT --merge"
        return ModelError(f"holds a LoRA adapter{base}, not a whole model", where=where, fix=fix)
    return ModelError("holds no config.json", where=where, fix="name the folder of a Hugging Face model, or of a run")


def _refuse_absent(text: str, where: str, revision: str | None) -> None:
    cached = try_to_load_from_cache(text, "config.json", revision=revision)
    if (reason := _why_unreachable(text)) and not isinstance(cached, str):
        version = f" at revision {revision}" if revision else ""
        what = f"neither a local folder nor in the local cache{version}, and the Hugging Face hub is out of reach"
        what += f" ({reason})"
        raise ModelError(what, where=where, fix="give a local Hugging Face folder, or mend the name or the network")


@cache
def _why_unreachable(name: str) -> str:
    """What keeps the hub from answering about `name`, in a line; empty where it answers, be it with a refusal.

    Raises `HFValidationError` for what can be no name.
    """
    said: list[str | HFValidationError] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=PATIENCE_SECONDS)
        except HFValidationError as error:
            said.append(error)
        except HfHubHTTPError as error:
            said.append(first_line(error) if error.response.status_code >= SERVER_ERROR else "")
        except Exception as error:  # the client's network errors have no common base but this
            said.append(first_line(error))
        else:
            said.append("")

    asking = threading.Thread(target=ask, daemon=True)  # resolving a name knows no timeout
    asking.start()
    asking.join(PATIENCE_SECONDS)
    answer = said[0] if said else f"no answer in {PATIENCE_SECONDS:g} s"
    if isinstance(answer, HFValidationError):
        raise answer
    return answer
