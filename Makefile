# One word for each habit; CONTRIBUTING.md says when to use which.
#   make test ARGS="-k resume"         arguments for pytest
#   make test WORKERS=8                test files beside each other; each worker wants about 1.5 GB
#   make quickstart PYTHON=python3.12  another interpreter than python3

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= bench/results
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-all bench gpu lint

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    "MegaTrain needs Python 3.11 or newer and $(PYTHON) is %d.%d; try: make PYTHON=python3.12 ..." % v[:2])'
	@echo "installing into $(VENV) (once; PyTorch is a large download)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: venv  ## train a small model on this machine
	$(BIN)/megatrain train configs/quickstart.yaml

test: venv  ## what CI runs: everything that is neither slow nor for a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

test-all: venv  ## everything, with the thorough property tests
	$(BIN)/python -m pytest --hypothesis-profile=thorough $(ARGS)

bench: venv  ## measure this machine and write the tables
	$(BIN)/python -m bench --out $(OUT) $(ARGS)

# A GPU machine may have no package registry, so this one uses $(PYTHON) as it stands, with whatever versions it
# holds: a warning from a version that we did not choose is shown but is no error.
gpu:  ## on a CUDA machine, with its own Python: the GPU tests, then the GPU benchmarks
	$(PYTHON) -m pytest -W default tests/gpu $(ARGS)
	$(PYTHON) -m bench.gpu --out $(OUT)

lint: venv  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
