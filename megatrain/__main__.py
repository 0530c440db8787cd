"""The entry point of `megatrain` and of `python -m megatrain`: Ctrl-C ends it quietly also while it still imports."""

import sys


def main() -> None:
    """Run the command line. Imports it here, where Ctrl-C is caught."""
    try:
        from megatrain import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
