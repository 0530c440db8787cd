"""What is asked of the operating system: paths, folders that appear whole, locks, direct I/O, time limits."""
