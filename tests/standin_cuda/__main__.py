"""Runs a module or a file on the stand-in CUDA device, and prints at the end what a real GPU might have got wrong.

    python -m tests.standin_cuda -m megatrain train config.yaml
    python -m tests.standin_cuda script.py ARGUMENT ...
    python -m tests.standin_cuda              # only builds it, where that is possible

Exits with 3 where the program ended well and accesses were found that do not wait for each other.
"""

from __future__ import annotations

import runpy
import sys

from tests import standin_cuda


def main(arguments: list[str]) -> int:
    if reason := standin_cuda.unavailable():
        print(f"no stand-in CUDA device: {reason}", file=sys.stderr)
        return 2 if arguments else 0
    device = standin_cuda.install()
    if not arguments:
        return 0
    status = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    found = device.violations()
    for each in found:
        print(f"stand-in CUDA device: {each}", file=sys.stderr)
    return status or (3 if found else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
