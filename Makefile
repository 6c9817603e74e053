PYTHON ?= python3
BIN := .venv/bin
# fairseq's requirements are outdated, hence --no-deps and no entry in the locks. It must be built in isolation.
FAIRSEQ := fairseq==0.12.2
# TORCH=cpu, or another of uv's names for a build of torch, such as cu126: uv knows where to get each.
TORCH ?=
INSTALL_TORCH = $(BIN)/python -m pip install --quiet uv && \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend $(TORCH) --requirement requirements.lock
# The extras of pyproject.toml that requirements.lock has; requirements-dev.lock has all.
RUN := train data translation sweeps
LOCK = uv pip compile pyproject.toml $(RUN:%=--extra %) --universal --python-version 3.11 --annotation-style line \
	--custom-compile-command "make lock" --quiet

# The tests start hundreds of processes: let Python keep what it has compiled, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart translation test quicktest reliability gpu lint format notebooks docs lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: .venv ## set up, then train a small AmoebaNet on the embedded photographs in two processes
	$(BIN)/python train.py +experiment=amoebanet_imagenet_laptop

translation: .venv/fairseq ## set up for translation: build fairseq, with a C++ compiler, in a minute and a half

test: .venv/development .venv/fairseq ## set up, then lint and run the tests in parallel
	$(MAKE) --jobs 2 lint quicktest

quicktest: .venv/development .venv/fairseq
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not alone and not reliability and not slow"

# The test files that have one of some marks: collecting all others takes a minute. In reverse order, the many short tests
# of end_to_end come last, so no worker is idle while another one finishes a long test.
marked = $$(grep --recursive --extended-regexp --files-with-matches --include="*.py" "mark\.($(1))" $(2) | sort --reverse)
# The tests marked alone: those of a start or a lost host have limits of seconds; the others mostly wait for time-outs.
reliability: .venv/development .venv/fairseq ## set up, then kill, stop, starve and disconnect runs, and run slow tests
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup -m "(reliability or slow) and not alone" \
		$(call marked,reliability|slow,tests)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m alone $(call marked,alone,tests/reliability)
	$(BIN)/python -m pytest --numprocesses 5 -m alone $(call marked,alone,tests --exclude-dir=reliability)

gpu: .venv/development ## on a machine with GPUs: test and measure, a quarter of an hour on one; run again to continue
	$(BIN)/python -m experiments.gpu

lint: .venv/development ## style, format, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: .venv/development ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: .venv/development ## execute the notebooks' scripts and write the notebooks
	$(BIN)/python notebooks/execute.py

docs: .venv/development ## build the documentation into site/; a broken link fails
	$(BIN)/mkdocs build --strict --quiet

.venv: .venv/installed ## make the virtual environment with what a run needs

# Each stamp is written last, so that an interrupted installation starts again.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gpipe needs Python 3.11 or later, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@echo 'Installing into .venv. $(if $(TORCH),It uses the $(TORCH) build of torch.,This downloads up to 2.9 GB if torch comes with CUDA; with TORCH=cpu it is 0.4 GB.)'
	$(PYTHON) -m venv .venv
	$(if $(TORCH),$(INSTALL_TORCH),$(BIN)/python -m pip install --quiet --requirement requirements.lock)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv/development: .venv/installed requirements-dev.lock
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.lock
	touch $@

.venv/fairseq: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps $(FAIRSEQ) || { echo "$(FAIRSEQ) was not built, see above: \
	install a C++ compiler, then run make translation again. Everything but translation works without it." >&2; exit 1; }
	touch $@

# NVIDIA's packages and triton are left out: a CUDA build of torch brings its own, a CPU build must not.
lock: ## resolve both locks again from pyproject.toml, keeping their pins where they still fit (needs uv)
	$(LOCK) --output-file requirements.lock
	$(LOCK) --extra tensorboard --extra notebooks --extra dev --constraint requirements.lock --output-file requirements-dev.lock
	sed -i.old -E '/^(nvidia-|cuda-|triton)/d' requirements*.lock && rm requirements*.lock.old

clean: ## remove the virtual environment, caches and the built documentation; runs stay
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build site src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
