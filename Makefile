# Everything runs in .venv, built from pyproject.toml and constraints.txt. A stamp in .venv carries a
# checksum of the two in its name, so an unchanged pair installs nothing, whatever the files' times say.

PYTHON ?= python3
BIN    := .venv/bin
PINS   := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
FULL   := .venv/full-$(PINS)
SMALL  := .venv/small-$(PINS)

.PHONY: help setup demo check format test test-torch bench clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(FULL) ## build .venv: every framework, plots, and the tools of development

demo: $(or $(wildcard $(FULL)),$(SMALL)) ## train digits on 1, 2 and 3 replicas and compare the digests
	$(BIN)/lockstep demo

check: setup ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check ## check, then every test and doctest of every framework, then the parity matrices
	$(MAKE) --jobs 2 --output-sync=target --no-print-directory test-torch test-jax

test-torch: setup # and all that knows no framework
	$(BIN)/pytest --doctest-modules src tests

# A framework's own tests run in a process of their own: threads, devices and types are set once per process.
test-%: setup
	LOCKSTEP_BACKENDS=numpy,$* $(BIN)/pytest --doctest-modules src/lockstep/backends/$* \
	    tests/backends/test_contract.py tests/backends/$* tests/parity/test_$*.py

bench: setup ## measure against DDP on this machine
	$(BIN)/python benchmarks/bench.py

clean: ## remove .venv and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(FULL): EXTRAS := torch,jax,tensorflow-cpu,plot,tensorboard,dev
$(SMALL): EXTRAS := torch,plot
$(FULL) $(SMALL):
	$(PYTHON) -m venv .venv
	rm -f .venv/full-* .venv/small-*
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@
