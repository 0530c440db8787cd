"""A regular package, so that `tests.arch.house` means this folder and no other `tests` on the path."""
