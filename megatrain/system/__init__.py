"""Operating system services: paths, atomic folders, locks, time limits."""
