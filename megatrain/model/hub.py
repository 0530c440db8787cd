"""Whether the Hugging Face hub can be asked, found out once and soon.

The library asks a hub that is out of reach again and again, for half a minute, and prints a line each time. So it is
asked here first, one time and with little patience; where it does not answer, the library is told to look on this
machine only. It leaves out tokenizers, which `data.tokenizer` looks up in the same way.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from megatrain.errors import ModelError, first_line

PATIENCE_SECONDS = 2.5
"""How long the hub may take to answer, all names resolved and proxies passed."""

SERVER_ERROR = 500


def is_local(source: str | Path) -> bool:
    """Whether to look for a model on this machine only: it is a path that exists, or the hub is out of reach."""
    return Path(source).exists() or bool(_why_unreachable(str(source)))


def refuse_absent(source: str | Path, *, where: str) -> None:
    """Raise `ModelError` for a path that does not exist, and for a hub name that neither cache nor hub can give.

    A path is what no hub name looks like (`./a`, `a/b/c`, `a.json`), and `a/b` where there is a folder `a`.
    """
    path, text = Path(source), str(source)
    if path.exists():
        return
    if path.is_absolute() or len(path.parts) > 2 or text.startswith((".", "~")) or text.endswith((".json", "/")):
        raise ModelError("no such folder or file", where=where, fix="give a Hugging Face folder, or a hub name")
    if len(path.parts) == 2 and path.parent.is_dir():
        fix = f"the folder {path.parent} is here and holds no {path.name}; for the hub's, start from another folder"
        raise ModelError("no such folder or file", where=where, fix=fix)
    if (reason := _why_unreachable(text)) and not isinstance(try_to_load_from_cache(text, "config.json"), str):
        what = f"neither a local folder nor in the local cache, and the Hugging Face hub is out of reach ({reason})"
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
