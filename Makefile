# Everything sets itself up: a virtual environment in .venv, torch, the package with its extras, then the work.
# On a machine whose Python already has a CUDA build of torch:  make test VENV_FLAGS=--system-site-packages

PYTHON ?= python3
VENV_FLAGS ?=
# pins, so that a test run means the same thing tomorrow: torch, and the Triton that its CUDA builds bring. The package accepts a range.
TORCH ?= $(if $(findstring system-site-packages,$(VENV_FLAGS)),torch triton,torch==2.13.0 triton==3.7.1)
# the middle of the declared range, and the newest release whose Hub kernels work with kernels 0.17
TRANSFORMERS ?= transformers==5.22.2
# with the release of kernels that it asks for; the one that 5.24 asks for is on no index yet
OLDEST ?= 'transformers==5.17.0' 'kernels==0.16.2'
NEWEST ?= 'transformers>=5.17,<5.25'
# the oldest that compiles the Hopper kernels
OLDER_TRITON ?= triton==3.6.0
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
PYTEST_FLAGS ?=
DEMO_FLAGS ?=
FUZZ_FLAGS ?=

BIN := .venv/bin
# byte-compiling what is used once costs a fresh machine half a minute
export PIP_NO_COMPILE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
PIP = $(BIN)/python -m pip install --quiet --no-input
# one thread per test process: the processes share the cores
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup $(PYTEST_FLAGS)

SAY_VERSION = $(BIN)/python -c 'from importlib.metadata import version; print("transformers", version("transformers"))'

.PHONY: help test unit lint format demo fuzz clean oldest newest triton
.NOTPARALLEL:

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

# passive: threads that wait give their core away; on a busy machine the demo takes half the time
demo: .venv/demo ## full attention and MALA side by side on a real model; results in demo_results/
	OMP_WAIT_POLICY=passive $(BIN)/python -m mala_hf demo $(DEMO_FLAGS)

test: lint triton oldest newest unit ## lint, types, what depends on versions at the ends of their ranges, then all tests

lint: .venv/dev ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

unit: .venv/dev ## all tests
	$(PYTEST)

oldest: .venv/dev .overlays/oldest/done ## the Transformers tests on the oldest supported release
	@PYTHONPATH=.overlays/oldest $(SAY_VERSION)
	PYTHONPATH=.overlays/oldest $(PYTEST) -m transformers

newest: .venv/dev .overlays/newest/done ## the Transformers tests on the newest supported release
	@PYTHONPATH=.overlays/newest $(SAY_VERSION)
	PYTHONPATH=.overlays/newest $(PYTEST) -m transformers

triton: .venv/dev .overlays/triton/done ## compile the Hopper kernels ahead of time with an older Triton
	@PYTHONPATH=.overlays/triton $(BIN)/python -c 'import triton; print("triton", triton.__version__)'
	PYTHONPATH=.overlays/triton $(PYTEST) -m triton

fuzz: .venv/dev ## 10,000 drawn calls against the rule, with another seed: make fuzz FUZZ_FLAGS="--seed 7"; about half an hour
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python scripts/fuzz.py --cases 10000 $(FUZZ_FLAGS)

format: .venv/dev ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what make made
	rm -rf .venv .overlays build dist demo_results ruler_results work_results .mypy_cache .pytest_cache .ruff_cache

.venv/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) .venv
	$(PIP) $(TORCH)
	@touch $@

.venv/demo: .venv/torch pyproject.toml
	$(PIP) -e '.[demo]' $(TORCH) $(TRANSFORMERS)
	@touch $@

.venv/dev: .venv/torch pyproject.toml
	$(PIP) -e '.[dev,hub]' $(TORCH) $(TRANSFORMERS)
	@touch $@ .venv/demo

# only what differs and what that needs, laid over .venv: torch is installed once
.overlays/oldest/done: OVERLAY = $(OLDEST)
.overlays/newest/done: OVERLAY = $(NEWEST)
.overlays/triton/done: OVERLAY = --no-deps $(OLDER_TRITON)
.overlays/%/done: .venv/torch
	rm -rf $(@D)
	$(PIP) --target $(@D) $(OVERLAY)
	@touch $@
