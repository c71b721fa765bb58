# One command per habit. Everything runs in .venv, which `make setup` makes and keeps up to date.

PY := .venv/bin/python
SCRIPTS := $(wildcard scripts/*.sh benchmarks/*.sh .ci/run)

# Headers and archives that scripts/setup.sh unpacked where it was not root.
PREFIX := $(CURDIR)/.cache/prefix
export CPATH := $(PREFIX)/include$(if $(CPATH),:$(CPATH))
export LIBRARY_PATH := $(PREFIX)/lib$(if $(LIBRARY_PATH),:$(LIBRARY_PATH))

# Three processes, also on two CPUs: some tests wait. Each runs one file of tests at a time. Files in
# order of name: few tests do not mean a short time.
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder

# /tmp may be memory, where no file is ever cold and large ones do not fit.
export TMPDIR ?= /var/tmp

# Without bytecode each process of the tests would compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup build demo api lint types test test-quick coverage test-oldest gpu-check gpu-bundle clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 16

setup:  ## make .venv (6 GB, with torch and all that tests need), and build gdsload in place
	@sh scripts/setup.sh

demo: setup  ## load a 1.5 GB checkpoint, and compare with safetensors and transformers
	@$(PY) scripts/demo.py

api: setup  ## write docs/api.md from the docstrings
	@$(PY) scripts/api_reference.py

build: setup  ## sdist and wheel, into dist/
	$(PY) -m build --no-isolation

lint: setup  ## ruff, and shellcheck if it is installed
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	@if command -v shellcheck >/dev/null; then echo shellcheck $(SCRIPTS); shellcheck $(SCRIPTS); \
	else echo 'shellcheck: not installed, scripts not checked'; fi

types: setup  ## mypy over src, stubtest over the compiled modules
	$(PY) -m mypy
	@modules=$$(cd src/gdsload/_native && for so in *.so; do echo "gdsload._native.$${so%%.*}"; done); \
	echo stubtest $$modules; \
	MYPYPATH=src $(PY) -m mypy.stubtest --mypy-config-file scripts/stubtest.ini \
	    --allowlist scripts/stubtest.allow --ignore-unused-allowlist $$modules

test: setup lint types  ## lint, types, all tests; 6 to 15 minutes on 2 cores
	$(PY) -m pytest $(SPREAD)

test-quick: setup  ## the tests that need neither a model of transformers nor a benchmark
	$(PY) -m pytest $(SPREAD) --ignore tests/integrations --ignore tests/bench --ignore tests/project

coverage: setup  ## the tests, and the lines they do not reach; takes 1.5 times as long
	$(PY) -m pytest $(SPREAD) --cov --cov-report=term-missing

test-oldest: setup  ## from_pretrained with the oldest transformers that is supported
	@sh scripts/test-transformers.sh 4.57.6

.PHONY: test-remote
test-remote: setup  ## loads from real S3, GCS and Azure servers on loopback; needs Go and npm
	@sh scripts/test-remote.sh $(ARGS)

gpu-check: setup  ## on a machine with a GPU: exact bytes, hazards, rates, other loaders
	@$(PY) scripts/gpu_check.py $(ARGS)

gpu-bundle: setup  ## build/gpu-bundle: gpu-check for a machine with a GPU and without a network
	@$(PY) scripts/gpu_bundle.py

# A trial, with other arguments, replaces no result and no page.
KEPT := $(if $(ARGS),,--replace --publish)

.PHONY: faults
faults: setup  ## loads under failing system calls, the k-th for every k; ARGS='--every 20' for a part
	$(PY) -m benchmarks.faults $(KEPT) --sources local $(ARGS)
	$(PY) -m benchmarks.faults $(KEPT) --sources remote --jobs 10 $(ARGS)

.PHONY: sanitize malformed
sanitize: setup  ## native code under address, undefined and thread sanitizers; ARGS=--quick for a part
	@$(PY) scripts/sanitize.py $(ARGS)

malformed: bench-deps  ## malformed files and failing calls: how gdsload and other loaders end
	$(PY) -m benchmarks.malformed $(KEPT) $(ARGS)

.PHONY: soak fuzz mutants
soak: setup  ## thousands of loads in one process and in eight: nothing grows; ARGS='--loads 500'
	$(PY) -m benchmarks.soak $(KEPT) $(ARGS)

fuzz: setup  ## parsers, planner and command line under atheris; ARGS='--seconds 600'
	@sh scripts/fuzz.sh $(ARGS)

mutants: setup  ## faults put into checkpoint, planning and manifests, which a test must find; hours
	@sh scripts/mutants.sh $(ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/gdsload/_native/*.so .venv/gdsload.stamp
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

.PHONY: bench-deps bench bench-table bench-models bench-micro bench-compare bench-baseline
MODEL ?= build/demo/qwen3-0.6b
MODELS ?= $(MODEL) build/demo/qwen2.5-7b
REPEATS ?= 7
PREPARE_qwen2.5-7b := --prepare-factor 1
# The page cache of 15 GB leaves too little memory to touch before.
WARM_qwen2.5-7b := --state none

bench-deps: setup  ## the loaders that benchmarks compare with, in .cache/bench
	@sh benchmarks/deps.sh

bench-table: bench-deps  ## cold (in all states of memory) and warm tables of MODEL=directory
	@test -e $(MODEL) || $(PY) -m gdsload make-checkpoint $(notdir $(MODEL)) $(MODEL)
	$(PY) -m gdsload bench cold $(MODEL) --repeats $(REPEATS) --replace \
	    --state huge small idle none $(PREPARE_$(notdir $(MODEL)))
	@# Memory may be too small for the page cache and a copy: it reports that, and make continues.
	-$(PY) -m gdsload bench cold $(MODEL) --repeats $(REPEATS) --replace --warm $(WARM_$(notdir $(MODEL)))

WHOLE := gdsload transformers gdsload-model transformers:dtype=float32 gdsload-model:dtype=float32
# The limits of a cast: threads that do nothing else, into small and into huge pages.
COLD_CASTS := gdsload-model:dtype=float32,page_cache=fill \
    bare:dtype=float32,threads=8,request_kib=2048 \
    bare:dtype=float32,threads=8,request_kib=2048,pages=huge
WARM_CASTS := bare:dtype=float32,threads=2,cache=mapped,request_kib=2048 \
    bare:dtype=float32,threads=2,cache=mapped,request_kib=2048,pages=huge
WHOLE_qwen2.5-7b := gdsload transformers gdsload-model
MIXTURES ?= build/demo/small-moe build/demo/thin-moe

bench-models: bench-deps  ## from_pretrained of MODEL=directory, as it is and cast, cold and warm
	@test -e $(MODEL) || $(PY) -m gdsload make-checkpoint $(notdir $(MODEL)) $(MODEL)
	$(PY) -m gdsload bench cold $(MODEL) --repeats $(REPEATS) $(PREPARE_$(notdir $(MODEL))) \
	    --arms $(or $(WHOLE_$(notdir $(MODEL))),$(WHOLE) $(COLD_CASTS)) \
	    --output benchmarks/results/models-$(notdir $(MODEL))-cold.json
	-$(PY) -m gdsload bench cold $(MODEL) --repeats $(REPEATS) --warm \
	    --arms $(or $(WHOLE_$(notdir $(MODEL))),$(WHOLE) $(WARM_CASTS)) \
	    --output benchmarks/results/models-$(notdir $(MODEL))-warm.json

bench: bench-deps  ## docs/benchmarks.md, without object stores and trees; hours
	for model in $(MODELS); do $(MAKE) bench-table MODEL=$$model || exit 1; done
	for model in $(MODELS) $(MIXTURES); do $(MAKE) bench-models MODEL=$$model || exit 1; done
	$(PY) -m gdsload bench io $(firstword $(MODELS)) --replace
	$(PY) -m gdsload bench compare $(firstword $(MODELS)) --replace
	for model in $(MODELS); do $(PY) -m gdsload bench start $$model --replace || exit 1; done
	$(PY) -m gdsload bench scale --replace
	for program in first_call load_into restarts ranks; do \
	    $(PY) -m benchmarks.$$program $(firstword $(MODELS)) --replace || exit 1; done
	for program in parse pipeline first_read; do $(PY) -m benchmarks.$$program --replace || exit 1; done
	$(PY) -m benchmarks.pool .cache/bench/pool --replace
	$(PY) -m gdsload bench report

bench-micro: setup  ## seconds of small cold files, by pytest-benchmark
	$(PY) -m pytest benchmarks --benchmark-only

bench-compare: setup  ## fails if a step takes more instructions than the baseline (valgrind)
	$(PY) -m benchmarks.instructions

bench-baseline: setup  ## makes the current counts the baseline
	$(PY) -m benchmarks.instructions --keep
