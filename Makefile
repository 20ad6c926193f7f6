# Everything runs in .venv, built from pyproject.toml and constraints.txt. A stamp in .venv carries a
# checksum of the two in its name, so an unchanged pair installs nothing, whatever the files' times say.
# MXNet needs an older NumPy than the others and has .venv-mxnet, with constraints and a stamp of its own. So has
# .venv-scripts, which has the packages that tests/scripts trains.

PYTHON ?= python3
BIN    := .venv/bin
PINS   := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
FULL   := .venv/full-$(PINS)
SMALL  := .venv/small-$(PINS)
LAUNCH := .venv-launchers/full-$(shell cat constraints.txt constraints-launchers.txt | cksum | cut -d ' ' -f 1)
DOCS   := .venv-docs/full-$(shell cat pyproject.toml constraints.txt constraints-docs.txt | cksum | cut -d ' ' -f 1)
SCRIPT := .venv-scripts/full-$(shell cat pyproject.toml constraints.txt constraints-scripts.txt | cksum | cut -d ' ' -f 1)
MXNET  := .venv-mxnet/full-$(shell cat pyproject.toml constraints-mxnet.txt | cksum | cut -d ' ' -f 1)

# As much in MXNet's environment as shows that the core does with NumPy 1.23.
NUMPY := $(addprefix src/lockstep/,core data checkpoint backends/numpy)
NUMPY += $(filter-out %/test_low_precision.py %/test_global_rng.py %/test_membership.py,$(wildcard tests/core/test_*.py))
# Two of these need torch; test_membership.py explores a protocol without NumPy for seconds.
NUMPY += $(patsubst %,tests/data/test_%.py,pipeline_inputs order pipeline)
NUMPY += $(patsubst %,tests/checkpoint/test_%.py,load_arrays json_codec checkpoint_folder)

# The tests start hundreds of interpreters, and each would compile Lockstep anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo check format test test-browser test-core test-torch test-jax test-tensorflow test-mxnet test-launchers test-scripts docs test-install bench chaos chapters clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

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
	$(MAKE) --jobs 3 --output-sync=target --no-print-directory $(addprefix test-,jax tensorflow torch core mxnet) check

test-browser: $(FULL) ## the report in Chromium, which `make test` does not need
	$(BIN)/pytest tests/browser

TORCH := $(addprefix tests/,backends collectives examples gpu integration parity chaos/test_torch.py)

test-torch: $(FULL)
	$(BIN)/pytest --doctest-modules $(TORCH)

test-core: $(FULL) # and all that knows no framework; and a framework that Lockstep does not know
	$(BIN)/pytest --doctest-modules src tests $(addprefix --ignore=,$(TORCH) tests/browser tests/scripts)
	LOCKSTEP_BACKENDS=numpy,toy $(BIN)/pytest -k toy $(CONTRACT) tests/backends/test_array_ops.py tests/collectives

# Another framework's tests run in a process of their own: threads, devices and types are set once per process.
# The contract computes in double precision, which JAX and Keras set for the whole process too.
CONTRACT := $(addprefix tests/backends/,test_contract.py test_ema.py test_gradients.py test_replica_copies.py test_reduction.py)
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

# Warnings of these packages are none of ours.
test-scripts: $(SCRIPT) ## other packages' models, optimizers and metrics on 1, 2 and 3 devices; no part of make test: 2 minutes
	LOCKSTEP_BACKENDS=numpy,torch .venv-scripts/bin/pytest -W ignore tests/scripts
	LOCKSTEP_BACKENDS=numpy,jax .venv-scripts/bin/pytest -W ignore tests/scripts

# Real launchers, in a lane of their own: not part of `make test`. As root it installs SLURM and Open MPI where they are
# missing (Debian's packages); whatever is not there is skipped with a reason.
PROGRAMS := slurm-wlm munge openmpi-bin

test-launchers: $(LAUNCH) ## torchrun, SLURM, Open MPI, Ray and two network namespaces, for real
	@which srun mpirun munged > /dev/null || [ "$$(id -u)" != 0 ] || { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(PROGRAMS) > /dev/null; } || true
	.venv-launchers/bin/python -m pytest -rs --durations=10 tests/launchers

docs: $(DOCS) ## build the site of README and docs/ in site/, without a network; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

test-install: ## build wheel and sdist, install into empty environments, train there (INSTALL="core jax", VERSIONS=lowest)
	$(PYTHON) .ci/install.py --versions $(or $(VERSIONS),pinned) $(or $(INSTALL),core torch mxnet)

bench: setup ## measure against plain loops, DDP and the like; writes pages if nothing else runs: 20 minutes
	$(BIN)/python benchmarks/torch_step.py --page
	$(BIN)/python benchmarks/jax_step.py --page
	$(BIN)/python benchmarks/tensorflow_step.py --page
	.venv-mxnet/bin/python -W ignore benchmarks/mxnet_step.py --page
	$(BIN)/python benchmarks/shard_cost.py --page

chaos: $(FULL) ## make worker processes fail at 500 random points (LOCKSTEP_CHAOS_FAULTS); writes a page: 10 minutes
	$(BIN)/python benchmarks/random_faults.py

chapters: setup ## run the multi-device chapters in full and write docs/chapters.md
	$(BIN)/python benchmarks/chapters.py
	.venv-mxnet/bin/python -W ignore benchmarks/chapters.py

clean: ## remove .venv, every .venv-*, the site and every cache
	rm -rf .venv .venv-docs .venv-launchers .venv-mxnet .venv-scripts site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(FULL): EXTRAS := torch,jax,tensorflow-cpu,plot,tensorboard,dev
$(SMALL): EXTRAS := torch,plot
$(FULL) $(SMALL):
	$(PYTHON) -m venv .venv
	rm -f .venv/full-* .venv/small-*
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

# Over .venv, whose packages it sees: only Ray and what it needs are added.
$(LAUNCH): $(FULL)
	$(BIN)/python -m venv .venv-launchers
	rm -f .venv-launchers/full-*
	.venv-launchers/bin/python -c 'import site, sys; from pathlib import Path; \
	    Path(site.getsitepackages()[0], "main.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	    $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	PIP_CONSTRAINT=constraints-launchers.txt .venv-launchers/bin/pip install --quiet --disable-pip-version-check 'ray[train]'
	touch $@

$(DOCS):
	$(PYTHON) -m venv .venv-docs
	rm -f .venv-docs/full-*
	PIP_CONSTRAINT='constraints.txt constraints-docs.txt' .venv-docs/bin/pip install --quiet --disable-pip-version-check \
	    --editable '.[docs]'
	touch $@

$(SCRIPT):
	$(PYTHON) -m venv .venv-scripts
	rm -f .venv-scripts/full-*
	PIP_CONSTRAINT='constraints.txt constraints-scripts.txt' .venv-scripts/bin/pip install --quiet --disable-pip-version-check \
	    --editable '.[torch,jax,test,scripts]'
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
