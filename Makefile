# One word for each habit; CONTRIBUTING.md says when to use which.
#   make test ARGS="-k resume"         arguments for pytest
#   make test WORKERS=8                test files beside each other; each worker wants about 1.5 GB
#   make quickstart PYTHON=python3.12  another interpreter than python3

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= bench/results
# Where it is set, each process of the tests compiles all of them again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Seconds for one test: a hang is a failure, with the stacks of all threads.
PYTEST := $(BIN)/python -m pytest --timeout=300
WORKERS ?= 2
# A worker that dies ends the run, red, at once.
BESIDE := -n $(WORKERS) --max-worker-restart=0
# In order of their names: the files of a few long tests come last otherwise, and one worker waits for the other.
BY_FILE := $(BESIDE) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-cuda test-all test-cpus bench gpu lint docs dist

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

quickstart: venv  ## train a small model on this machine, or go on with it
	$(BIN)/megatrain train configs/quickstart.yaml resume=auto $(ARGS)

test: venv  ## what CI runs: everything that is neither slow nor for a GPU
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not gpu" $(BY_FILE) $(ARGS)

$(VENV)/.cuda: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,cuda]'
	@touch $@

test-cuda: $(VENV)/.cuda  ## the GPU tests, on a CUDA device that is not there (a C++ compiler is needed; tests/standin_cuda)
	$(BIN)/python -m tests.standin_cuda  # built once, and not by each worker
	OMP_NUM_THREADS=1 $(PYTEST) -p tests.standin_cuda.plugin tests/gpu tests/standin_cuda \
	    tests/train/test_device_update.py tests/stock/test_without_gradients.py -m gpu $(BESIDE) --dist load $(ARGS)

test-all: venv  ## everything, with the thorough property tests; says at its end how long it took
	@begin=$$(date +%s); $(PYTEST) --hypothesis-profile=thorough $(ARGS); code=$$?; \
	    echo "make test-all took $$(( ($$(date +%s) - begin) / 60 )) minutes by the clock"; exit $$code

# Instruction sets of oneDNN and of PyTorch, and OpenMP's threads: what other processors would run. A processor runs those
# that it has itself and those below.
CPUS := ALL/avx512/4 AVX512_CORE_BF16/avx512/2 AVX512_CORE/avx2/1 AVX2/avx2/4 SSE41/default/2
test-cpus: venv  ## the tests as processors with fewer instructions would run them (slow: five times `make test`)
	@for each in $(CPUS); do \
	    echo "== ONEDNN_MAX_CPU_ISA / ATEN_CPU_CAPABILITY / OMP_NUM_THREADS = $$each"; \
	    set -- $$(echo $$each | tr / ' '); \
	    ONEDNN_MAX_CPU_ISA=$$1 ATEN_CPU_CAPABILITY=$$2 OMP_NUM_THREADS=$$3 $(BIN)/python -m pytest \
	        -m "not slow and not gpu" $(BY_FILE) -q $(ARGS) || exit 1; \
	done

bench: venv  ## measure this machine and write the tables
	$(BIN)/python -m bench.step --out $(OUT)
	$(BIN)/python -m bench.adamw --json $(OUT)/adamw.json

# A GPU machine may have no package registry, so this one uses $(PYTHON) as it stands, with whatever versions it
# holds: a warning from a version that we did not choose is shown but is no error.
gpu:  ## on a CUDA machine, with its own Python: the GPU tests, then the GPU benchmarks
	$(PYTHON) -m pytest -W default tests/gpu $(ARGS)
	$(PYTHON) -m bench.gpu --out $(OUT)

$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

# NO_MKDOCS_2_WARNING: an advertisement of the theme's in every build.
docs: $(VENV)/.docs  ## the documentation as a site in build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "build/site/index.html"

lint: venv  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist:  ## build a wheel and an sdist into dist/, and try the wheel in a fresh environment
	@rm -rf build dist && $(PYTHON) -m venv build/tools && build/tools/bin/pip install --quiet build
	build/tools/bin/python -m build --outdir dist .
	@$(PYTHON) -m venv build/tried && build/tried/bin/pip install --quiet -c constraints.txt dist/*.whl
	cd build && tried/bin/megatrain --version && tried/bin/megatrain plan meta-llama/Llama-3.1-8B --hardware rtx-4090 >/dev/null
