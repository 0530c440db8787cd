"""Training: the engine that users hold, the sink that updates, the loop, and what is reported."""
