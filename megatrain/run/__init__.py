"""A training run from its configuration: data, resume, plan, reporting, and the files it leaves."""
