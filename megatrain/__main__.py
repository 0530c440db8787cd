"""`python -m megatrain`: the command line without an installed script."""

from megatrain.cli import main

if __name__ == "__main__":
    main()
