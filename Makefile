# One command per habit. Everything runs in .venv, which `make setup` makes and keeps up to date.

PY := .venv/bin/python
SCRIPTS := $(wildcard scripts/*.sh benchmarks/*.sh .ci/run)

# Headers and archives that scripts/setup.sh unpacked where it was not root.
PREFIX := $(CURDIR)/.cache/prefix
ifneq ($(wildcard $(PREFIX)),)
export CPATH := $(PREFIX)/include$(if $(CPATH),:$(CPATH))
export LIBRARY_PATH := $(PREFIX)/lib$(if $(LIBRARY_PATH),:$(LIBRARY_PATH))
endif

.DEFAULT_GOAL := help
.PHONY: help setup build demo lint types test test-oldest gpu-check clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 14

setup:  ## make .venv, and build gdsload in place
	@sh scripts/setup.sh

demo: setup  ## load a 1.5 GB checkpoint cold and warm, beside what you use today
	@$(PY) scripts/demo.py

build: setup  ## sdist and wheel, into dist/
	$(PY) -m build --no-isolation

lint: setup  ## ruff, and shellcheck where it is installed
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	@if command -v shellcheck >/dev/null; then echo shellcheck $(SCRIPTS); shellcheck $(SCRIPTS); \
	else echo 'shellcheck: not installed, scripts not checked'; fi

types: setup  ## mypy over src, stubtest over the compiled modules
	$(PY) -m mypy
	@modules=$$(cd src/gdsload/_native && for so in *.so; do echo "gdsload._native.$${so%%.*}"; done); \
	echo stubtest $$modules; \
	MYPYPATH=src $(PY) -m mypy.stubtest --allowlist scripts/stubtest.allow \
	    --ignore-unused-allowlist $$modules

test: setup lint types  ## everything: lint, types, tests with coverage
	$(PY) -m pytest --cov --cov-report=term

test-oldest: setup  ## from_pretrained with the oldest transformers that is supported
	@sh scripts/test-transformers.sh 4.57.6

gpu-check: setup  ## on a machine with a GPU: every road, exact bytes, memory given back, rates
	@$(PY) scripts/gpu_check.py $(ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/gdsload/_native/*.so .venv/gdsload.stamp
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

.PHONY: bench-deps bench
MODEL ?= build/demo/qwen3-0.6b
REPEATS ?= 7

bench-deps: setup  ## the loaders that benchmarks compare with, in .cache/bench
	@sh benchmarks/deps.sh

bench: bench-deps  ## cold and warm tables of MODEL=directory, REPEATS=7, raw runs kept
	@test -e $(MODEL) || { mkdir -p $(dir $(MODEL)) && \
	    $(PY) -c "from gdsload import synth; synth.write('$(notdir $(MODEL))', '$(MODEL)')"; }
	$(PY) -m benchmarks.cold $(MODEL) --repeats $(REPEATS) --state backed
	$(PY) -m benchmarks.cold $(MODEL) --repeats $(REPEATS) --state idle
	$(PY) -m benchmarks.cold $(MODEL) --repeats $(REPEATS) --state backed --warm
	$(PY) -m benchmarks.render
