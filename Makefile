# Two commands: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-faults test-federation test-browser screenshots soak release-check lint docs bench clean
help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

$(READY): pyproject.toml companion/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower,privacy]' -e companion
	touch $(READY)

demo: $(READY)  ## Train NIW, Mixture and FedAvg on the embedded digits, compare them, and write runs/demo/report.html
	$(BIN)/fedhb compare examples/demo.toml --out runs/demo --resume
	$(BIN)/fedhb report runs/demo

test: $(READY) lint  ## Lint, type checks, and the tests but those of the targets below
	$(BIN)/python -m pytest -n 2

test-faults: $(READY)  ## Crashes, full disks, dead workers, damaged files, hostile clients: a part of each (under ten minutes)
	FEDHB_FAULTS=0.01 $(BIN)/python -m pytest -n 2 -m 'faults or not faults' tests/faults

soak: $(READY)  ## The same with the full numbers of docs/reliability.md (hours)
	FEDHB_FAULTS=1 $(BIN)/python -m pytest -n 2 -m 'faults or not faults' tests/faults -o junit_family=xunit1 --junit-xml=soak.xml --durations=0

release-check: $(READY)  ## Build source and wheel, install them into a clean environment, use them; versions, licences, advisories
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python -m pytest -m release -rs tests/release

test-federation: $(READY)  ## Real Flower processes on loopback: same numbers, faults, a killed server (about ten minutes)
	$(BIN)/python -m pytest -m federation tests/federation

BROWSER := $(VENV)/.browser
$(BROWSER): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	command -v "$${CHROMIUM:-chromium}" >/dev/null || { \
	  run=""; [ "$$(id -u)" = 0 ] || run=sudo; $$run apt-get update -qq && $$run apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	touch $(BROWSER)

test-browser: $(BROWSER)  ## The pages of `fedhb report` in headless Chromium (installs Debian's where it is missing)
	$(BIN)/python -m pytest -m browser tests/browser

screenshots: demo $(BROWSER)  ## The pictures of docs/images/, from the demo's page
	$(BIN)/python tests/browser/screenshots.py docs/images

lint: $(READY)  ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DOCS := $(VENV)/.docs
$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS)

docs: $(DOCS)  ## The site from docs/ and the API reference from docstrings, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -W error::UserWarning docs/reference.py site/api

bench: $(READY)  ## Speed and memory on reference work, beside plain PyTorch (minutes; a quiet machine)
	$(BIN)/fedhb bench

clean:  ## Remove the environment and the demo's runs
	rm -rf $(VENV) runs/demo site
