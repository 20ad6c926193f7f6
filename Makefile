# Everything runs in .venv, built from pyproject.toml and constraints.txt. A stamp in .venv carries a
# checksum of the two in its name, so an unchanged pair installs nothing, whatever the files' times say.
# MXNet needs an older NumPy than the others and has .venv-mxnet, with constraints and a stamp of its own.

PYTHON ?= python3
BIN    := .venv/bin
PINS   := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
FULL   := .venv/full-$(PINS)
SMALL  := .venv/small-$(PINS)
MXNET  := .venv-mxnet/full-$(shell cat pyproject.toml constraints-mxnet.txt | cksum | cut -d ' ' -f 1)

# As much in MXNet's environment as shows that the core does with NumPy 1.23.
NUMPY := $(addprefix src/lockstep/,core data checkpoint backends/numpy)
NUMPY += $(filter-out %/test_low_precision.py %/test_global_rng.py,$(wildcard tests/core/test_*.py)) # these two need torch
NUMPY += $(patsubst %,tests/data/test_%.py,inputs order pipeline)
NUMPY += $(patsubst %,tests/checkpoint/test_%.py,load_arrays json_codec store)

# The tests start hundreds of interpreters, and each would compile Lockstep anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo check format test test-core test-torch test-jax test-tensorflow test-mxnet bench chapters clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(FULL) $(MXNET) ## build .venv (torch, jax, tensorflow, plots, the tools of development) and .venv-mxnet

demo: $(or $(wildcard $(FULL)),$(SMALL)) ## train digits on 1, 2 and 3 replicas and compare the digests
	$(BIN)/lockstep demo

check: $(FULL) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(FULL) ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Three at a time, for on two cores a test also waits; the longest first, so that they end together.
test: setup ## check, and every test and doctest of every framework, with the parity matrices
	$(MAKE) --jobs 3 --output-sync=target --no-print-directory check $(addprefix test-,jax torch tensorflow core mxnet)

TORCH := $(addprefix tests/,backends collectives examples gpu integration parity)

test-torch: $(FULL)
	$(BIN)/pytest --doctest-modules $(TORCH)

test-core: $(FULL) # and all that knows no framework
	$(BIN)/pytest --doctest-modules src tests $(addprefix --ignore=,$(TORCH))

# Another framework's tests run in a process of their own: threads, devices and types are set once per process.
# The contract computes in double precision, which JAX and Keras set for the whole process too.
CONTRACT := $(addprefix tests/backends/,test_contract.py test_ema.py test_replica_copies.py test_reduction.py)
SHORT    := tests/collectives tests/examples/test_chapters.py
OWN       = src/lockstep/backends/$1 tests/backends/$1 tests/parity/test_$1.py

test-jax: $(FULL)
	LOCKSTEP_BACKENDS=numpy,jax $(BIN)/pytest --doctest-modules $(CONTRACT) $(call OWN,jax)
	LOCKSTEP_BACKENDS=numpy,jax $(BIN)/pytest $(SHORT)

test-tensorflow: $(FULL)
	LOCKSTEP_BACKENDS=numpy,tensorflow,keras $(BIN)/pytest $(CONTRACT) $(SHORT)
	LOCKSTEP_BACKENDS=tensorflow,keras $(BIN)/pytest --doctest-modules $(call OWN,tensorflow) $(call OWN,keras)

test-mxnet: $(MXNET)
	LOCKSTEP_BACKENDS=numpy,mxnet .venv-mxnet/bin/pytest --doctest-modules $(CONTRACT) $(SHORT) $(call OWN,mxnet) $(NUMPY)

bench: setup ## measure against plain loops, DDP and the like; writes pages if nothing else runs: 20 minutes
	$(BIN)/python benchmarks/torch_step.py --page
	$(BIN)/python benchmarks/jax_step.py --page
	$(BIN)/python benchmarks/tensorflow_step.py --page
	.venv-mxnet/bin/python -W ignore benchmarks/mxnet_step.py --page

chapters: setup ## run the multi-device chapters in full and write docs/chapters.md
	$(BIN)/python benchmarks/chapters.py
	.venv-mxnet/bin/python -W ignore benchmarks/chapters.py

clean: ## remove .venv, .venv-mxnet and every cache
	rm -rf .venv .venv-mxnet .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(FULL): EXTRAS := torch,jax,tensorflow-cpu,plot,tensorboard,dev
$(SMALL): EXTRAS := torch,plot
$(FULL) $(SMALL):
	$(PYTHON) -m venv .venv
	rm -f .venv/full-* .venv/small-*
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

$(MXNET):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	{ echo 'MXNet 1.9.1 and its NumPy 1.23.5 need Python 3.11. Use make $(MAKECMDGOALS) PYTHON=python3.11.' >&2; exit 1; }
	$(PYTHON) -m venv .venv-mxnet
	rm -f .venv-mxnet/full-*
	PIP_CONSTRAINT=constraints-mxnet.txt .venv-mxnet/bin/pip install --quiet --disable-pip-version-check \
	    --editable '.[mxnet,plot,test]'
	@.venv-mxnet/bin/python -W ignore -c 'import mxnet' || \
	{ echo 'MXNet does not import. Where the line above names a missing library: apt-get install libgomp1 libquadmath0.' >&2; exit 1; }
	touch $@
