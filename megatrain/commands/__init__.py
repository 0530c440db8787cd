"""The command line's commands, one file each; `cli` declares their arguments."""
