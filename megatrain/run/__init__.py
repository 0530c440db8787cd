"""A training run from its configuration: data, resume, plan, reporters, what is left at its end."""
