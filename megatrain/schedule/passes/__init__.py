"""The parts of a step's schedule, a file each: weights, recomputation, gradients, staging, phases."""
