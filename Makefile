# Needs python3 (3.10 or newer) and a C++ compiler; everything else is installed into .venv, once.
#
#   make demo        optimize a trained model, check it, compile the plugins; build and time engines where there is a GPU
#   make test        lint, types, tests
#   make test-real   tests on twelve trained models (fetches 300 MB)
#   make wheel       build sdist and wheel, and try them in environments of their own, for each Python that is here
#   make docs        the documentation, in build/site (fetches mkdocs-material)
#   make lint format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST_FLAGS ?= -n 2

.PHONY: help demo test test-real lint format wheel docs clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is older than 3.10; say which to use: make PYTHON=python3.12"; exit 2; }
	@echo "== setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) -m venv failed; on Debian: apt-get install python3-venv"; exit 2; }
	@$(PIP) install --upgrade pip
	@touch $@

# One stamp for each set of extras: made again when pyproject.toml changes.
$(VENV)/.with-nvcc: pyproject.toml | $(VENV)/.made
	@echo "== installing onnxfuse[nvcc] (the first time: 300 MB, mostly the CUDA compiler)"
	@$(PIP) install -e '.[nvcc]'
	@touch $@

$(VENV)/.with-dev: pyproject.toml | $(VENV)/.made
	@echo "== installing onnxfuse[dev,nvcc] (the first time: 350 MB, mostly the CUDA compiler)"
	@$(PIP) install -e '.[dev,nvcc]'
	@touch $@

$(VENV)/.with-docs: pyproject.toml | $(VENV)/.made
	@echo "== installing onnxfuse[docs]"
	@$(PIP) install -e '.[docs]'
	@touch $@

demo: $(VENV)/.with-nvcc
	@$(BIN)/python scripts/demo.py

lint: $(VENV)/.with-dev
	@echo "== ruff"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy

format: $(VENV)/.with-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint
	@echo "== pytest"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) --ignore=tests/real

test-real: $(VENV)/.with-dev
	@$(BIN)/python models/fetch
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/real

wheel: $(VENV)/.with-dev
	@echo "== building sdist and wheel"
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . >build.log 2>&1 || { tail -20 build.log; exit 1; }
	@rm -f build.log
	@scripts/check-wheel $(BIN)/python dist/*.whl nvcc
	@scripts/check-wheel $(BIN)/python dist/*.tar.gz
	@for version in 3.10 3.11 3.12 3.13; do \
	  python=$$(scripts/find-python $$version) || { echo "== Python $$version is not here: not tried"; continue; }; \
	  scripts/check-wheel "$$python" dist/*.whl || exit 1; done

docs: $(VENV)/.with-docs
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet
	@echo "== build/site/index.html"

clean:
	rm -rf dist build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
