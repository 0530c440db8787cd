"""The passes that build a step's schedule: weights, recomputation, gradients, staging, phases."""
