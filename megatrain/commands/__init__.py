"""The work of the command line's verbs, a file each; `cli` declares their arguments."""
