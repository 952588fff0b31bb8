# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo test test-all lint format docs docs-check pictures clean

demo: $(VENV)/.demo
	$(BIN)/weft demo

test: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

test-all: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Writes the pages that are made by scripts, then the site, without the network; a warning is an error.
docs: $(VENV)/.dev
	$(BIN)/python -m docs.scripts
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-check: $(VENV)/.dev
	$(BIN)/python -m docs.scripts --check
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

# The screenshots of the dashboard in docs/pictures, of real runs (about two minutes).
pictures: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/python docs/scripts/pictures.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "weft needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

# The page is tested in the distribution's own Chromium; where it cannot be had, those tests are skipped and say so.
$(VENV)/.browser: $(VENV)/bin/python
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } \
	  || echo "no Chromium, and it cannot be installed from here: the page is not tested in a browser"
	@touch $@

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
