"""What the C library does with memory that is freed: keep it for what comes next, rather than hand it back.

A training step takes and frees the same memory over and over, and the system's fresh pages are dear, most of all on a
virtual machine (`python -m bench.pages`). By itself the C library maps every block above 32 MiB afresh, and gives back
the top of its heap whenever much of it is free. From a device's first step until it is closed, it does neither; what
has been freed goes back when there is reason to (`trim`), and when the last device closes. Left out: any C library but
glibc, and threads other than the first, whose heaps end at 64 MiB.
"""

from __future__ import annotations

import ctypes
import threading

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of `mallopt`, by their numbers in malloc.h."""
NEVER, NONE = -1, 0
USUAL_TRIM_NBYTES, USUAL_MMAPS = 64 << 20, 65536
"""Where the C library's own thresholds end up once blocks of 32 MiB have been freed."""

_lock = threading.Lock()
_open = 0


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


_library = _glibc()


def keep_freed() -> None:
    """From now on freed memory stays with the process, until `let_go` has been called as often."""
    global _open
    with _lock:
        _open += 1
        if _open == 1 and _library is not None:
            _library.mallopt(MMAP_MAX, NONE)
            _library.mallopt(TRIM_THRESHOLD, NEVER)


def let_go() -> None:
    """The end of one `keep_freed`; with the last one, what is free goes back."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0 and _library is not None:
            _library.mallopt(MMAP_MAX, USUAL_MMAPS)
            _library.mallopt(TRIM_THRESHOLD, USUAL_TRIM_NBYTES)
    trim()


def trim() -> None:
    """Give what is free back to the system."""
    if _library is not None:
        _library.malloc_trim(0)
