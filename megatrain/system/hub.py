"""Sends one request to the Hugging Face Hub, without retries and with a short timeout.

If the Hub cannot be reached, the libraries retry for half a minute, and their timeouts do not cover a DNS server that
does not answer. So a name is looked up here before a library loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 5.0
"""How long the Hub may take to answer, including DNS and proxies."""


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
