"""Small files that appear whole or not at all: written beside, under a name of this process, then put in place.

What stood there stays until then, and stays where writing fails. Left out: folders (`checkpoint.appear`), and forcing
what was written to the disk, which a file that can be made again does not need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write, in the folder of `path`, with its suffix; it becomes `path` when the block ends without an error.

    Raises the `OSError` of a folder that refuses it.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
