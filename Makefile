# `make demo` and `make test` do everything; both install first.
PYTHON ?= python3
VENV ?= .venv
DOMAIN ?= rewrite
BIN := $(VENV)/bin

.PHONY: install demo test test-all soak lint format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: install
	@mkdir -p out
	$(BIN)/spectune tune --target demo --draft lookup --draft demo --draft hybrid \
		--prompts examples/domains/$(DOMAIN).jsonl --out out/demo-$(DOMAIN).yaml \
		--max-new-tokens 48 --tune-prompts 12 --holdout-prompts 20 --budget-min 8

test: install
	$(BIN)/python -m pytest

test-all: install
	$(BIN)/python -m pytest -m "not soak"

soak: install
	$(BIN)/python -m pytest -m soak

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
