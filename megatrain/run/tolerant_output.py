"""Output of a run that tolerates failing writes, to a full disk or a closed terminal: text is lost, training goes on.

A log on a full disk, or a terminal that has gone while the run goes on (`nohup`, `disown`), would otherwise end a run
of weeks by an `OSError` in the line that reports a step. A closed pipe still ends it, as it ends any program.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class TolerantOutput:
    """A text stream that loses what cannot be written; `tell` gets the first failure as a line."""

    def __init__(self, stream: TextIO, tell: Callable[[str], object]) -> None:
        self._stream, self._tell, self._failed = stream, tell, False

    def write(self, text: str) -> int:
        """Write, or lose, the text."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            if not self._failed:
                self._failed = True
                with suppress(OSError):
                    self._tell(f"output cannot be written ({error.strerror or error}); the run goes on without it")
