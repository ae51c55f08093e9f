# make demo, make test, make lint: each sets up what it needs in .venv on a machine that has Python 3 and make.

PYTHON ?= python3
# Compiled modules are worth keeping: every rank imports all of torch.
unexport PYTHONDONTWRITEBYTECODE
# A uv that works (a shim that only complains is not one), else our own.
UV := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo .tools/bin/uv)
RUN := .venv/bin/python

.PHONY: help demo test lint benchmarks lock clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: .venv/.ready  ## train a small Llama3 on this machine's CPU, in about two minutes
	@$(RUN) examples/demo.py

test: .venv/.ready  ## run all tests that need no GPU
	$(RUN) -m pytest

lint: .venv/.ready  ## style, types, layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

benchmarks: .venv/.ready  ## measure start-up, step overhead, recovery and checkpoints beside their peers
	$(RUN) benchmarks/startup.py
	$(RUN) benchmarks/step_overhead.py
	$(RUN) benchmarks/recovery.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/data.py

lock: $(UV)  ## choose exact versions anew
	$(UV) pip compile -q pyproject.toml --extra dev --extra demo --extra hf --universal \
		--no-emit-index-url --no-annotate --custom-compile-command "make lock" -o requirements.lock

clean:  ## remove what the commands above made
	rm -rf .venv .tools demo

.venv/.ready: requirements.lock pyproject.toml | $(UV)
	@echo "setting up .venv (once)"
	$(UV) venv -q --clear .venv
	VIRTUAL_ENV=.venv $(UV) pip sync -q requirements.lock
	VIRTUAL_ENV=.venv $(UV) pip install -q --no-deps -e .
	@touch $@

.tools/bin/uv:
	@echo "bringing uv (once)"
	$(PYTHON) -m venv .tools
	.tools/bin/pip install -q --disable-pip-version-check uv
