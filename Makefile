# Everything a fresh clone needs. Each target does its own set-up, once, into .venv.
#
#   make demo     watch the demo model decode speculatively, and be checked against plain decoding
#   make test     the fast tests          make check    format, lint, types, import rules
#   make bench    AR against each drafter make test-slow  what takes minutes

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.specla-stamp
JOBS   ?= 2
PROMPT ?= Tom has 20 marbles. He gives 5 marbles to Ben and 3 marbles to Lisa. How many marbles does he have left?
ARGS   ?=

# With a GPU, torch comes in its default (CUDA) build and its pin is lifted.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
ifneq ($(GPU),)
TORCH  := torch>=2.11
EXTRAS := dev,gpu
else
EXTRAS := dev
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check fix bench venv-fla constraints size clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "specla needs Python 3.11 or newer: apt install python3 python3-venv"; exit 1; }
	@test -x $(BIN)/pip || { echo "[1/3] making $(VENV) with $(PYTHON)"; \
	  $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt install python3-venv"; rm -rf $(VENV); exit 1; }; }
	@echo "[2/3] installing specla, $(TORCH) and the tools (minutes, the first time)"
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
	  --constraint $(VENV)/constraints.txt "$(TORCH)" --editable ".[$(EXTRAS)]"
	@echo "[3/3] checking the installation"
	@$(BIN)/specla --version
	@touch $@

demo: $(STAMP)
	@$(BIN)/specla generate --compare --max-tokens 128 --prompt "$(PROMPT)" $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff format --check src tests
	@$(BIN)/ruff check src tests
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q $(wildcard tests/test_*.py)

fix: $(STAMP)
	@$(BIN)/ruff format src tests
	@$(BIN)/ruff check --fix src tests

bench: $(STAMP)
	@$(BIN)/specla bench generate --record $(ARGS)

# flash-linear-attention in a venv of its own, for the slow parity tests: it needs triton.
venv-fla: .venv-fla/.specla-stamp
.venv-fla/.specla-stamp:
	@test -x .venv-fla/bin/python || $(PYTHON) -m venv .venv-fla
	@.venv-fla/bin/python -m pip install -qq --no-compile --disable-pip-version-check \
	  --constraint constraints.txt torch==2.13.0 "triton>=3.6" flash-linear-attention==0.6.0 einops pytest
	@touch $@

constraints: $(STAMP)
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
	  | sed 's/^torch==.*/torch==2.13.0/'; } > constraints.tmp && mv constraints.tmp constraints.txt

size:
	@find src -name '*.py' | xargs wc -l | sort -n | tail -25

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
