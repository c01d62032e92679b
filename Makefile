# Two commands: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-federation lint docs bench clean
help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower,privacy]'
	touch $(READY)

demo: $(READY)  ## Train NIW, Mixture and FedAvg on the embedded digits and compare them
	$(BIN)/fedhb compare examples/demo.toml --out runs/demo --resume

test: $(READY) lint  ## Lint, type checks, and every test
	$(BIN)/python -m pytest -n 2

test-federation: $(READY)  ## Real Flower processes on loopback: same numbers, faults, a killed server (about ten minutes)
	$(BIN)/python -m pytest -m federation tests/federation

lint: $(READY)  ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## The API reference from docstrings, into site/
	$(BIN)/pdoc --output-directory site --docformat google fedhb

bench: $(READY)  ## Speed and memory on reference work, beside plain PyTorch (minutes; a quiet machine)
	$(BIN)/fedhb bench

clean:  ## Remove the environment and the demo's runs
	rm -rf $(VENV) runs/demo site
