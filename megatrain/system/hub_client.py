"""Asks the Hugging Face Hub about a model or a data set: one request, without retries and with a short timeout.

If the Hub cannot be reached, the libraries retry for half a minute, and their timeouts do not cover a DNS server that
does not answer. So a name is looked up here before a library loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from megatrain.errors import ModelError, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 5.0
"""How long the Hub may take to answer, including DNS and proxies."""

SERVER_ERROR = 500


def ask_hub(request: Callable[[HfApi], Any]) -> Any:
    """The result of `request`, which is called with a client. Raises what it raises, or `TimeoutError`."""
    import huggingface_hub

    found: list[Any] = []
    failed: list[Exception] = []

    def call() -> None:
        try:
            found.append(request(huggingface_hub.HfApi()))
        except Exception as error:  # the client's errors have no other common base
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s")
    return found[0]


def refuse_absent_model(name: str, where: str, revision: str | None = None) -> None:
    """Raise `ModelError` for a name that is no local path and that neither the local cache nor the Hub has."""
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", "adapter_config.json"))
    if any(isinstance(path, str) for path in cached):
        return
    is_reachable, reason = look_up_model(name)
    if not is_reachable:
        version = f" at revision {revision}" if revision else ""
        what = f"neither a local folder nor in the local cache{version}, and the Hugging Face hub is unreachable"
        what += f" ({reason})"
        raise ModelError(what, where=where, fix="give a local Hugging Face folder, or correct the name or the network")
    if reason:
        raise ModelError(reason, where=where, fix="correct the name, or log in with `hf auth login`")


@cache
def look_up_model(name: str) -> tuple[bool, str]:
    """Whether the Hub answers about a model, and why it has none of this name, in one line; empty if it may have one.

    Raises `HFValidationError` for what cannot be a name on the Hub.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        ask_hub(lambda api: api.model_info(name, timeout=TIMEOUT_SECONDS))
    except HFValidationError:
        raise
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
