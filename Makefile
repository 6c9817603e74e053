PYTHON ?= python3
BIN := .venv/bin
# Its own requirements are outdated: hence --no-deps, and no entry in the lock. It must be built in isolation.
FAIRSEQ := fairseq==0.12.2

.DEFAULT_GOAL := help
.PHONY: help quickstart test reliability lint format notebooks lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: .venv ## set up, then train a small AmoebaNet on the embedded photographs in two processes
	$(BIN)/python train.py +experiment=amoebanet_imagenet scale=laptop

test: lint ## set up, then lint and run the tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not alone and not reliability"
	$(BIN)/python -m pytest --numprocesses 2 -m alone

reliability: .venv ## set up, then kill, stop, starve and disconnect whole runs: a quarter of an hour on two cores
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup -m reliability

lint: .venv ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: .venv ## execute the notebooks' scripts and write the notebooks
	$(BIN)/python notebooks/execute.py

.venv: .venv/installed ## make the virtual environment from requirements.lock

# The stamp is written last, so that an interrupted installation starts again.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gpipe needs Python 3.11 or later, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip install --quiet --no-deps $(FAIRSEQ) || echo "$(FAIRSEQ) was not installed, as said above; \
	all but its corpora, beam search and scorer works, and their tests fail: with a C++ compiler there, run \
	$(BIN)/python -m pip install --no-deps $(FAIRSEQ)" >&2
	touch $@

# NVIDIA's packages and triton are left out: a CUDA build of torch brings its own, a CPU build must not.
lock: ## resolve requirements.lock again from pyproject.toml, keeping its pins where they still fit (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --annotation-style line \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock
	sed -i.old -E '/^(nvidia-|cuda-|triton)/d' requirements.lock && rm requirements.lock.old

clean: ## remove the virtual environment and caches; runs stay
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
