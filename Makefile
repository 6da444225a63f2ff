# Set-up, training and tests of gluonpar. `make` lists the targets; everything is installed in VENV.
#
#   NUM_GPUS=4      how many devices `make train` uses
#   RANKS=2         how many processes `make train-mpi` starts, with NUM_GPUS devices each
#   ARGS="..."      further arguments of scripts/train_lenet.py, or of tools/test_matrix.py
#   PYTHON=...      the interpreter, 3.8 to 3.12 (otherwise the first python3 that fits)
#   EXTRA=cpu       the MXNet to install, cpu or cu112 (otherwise what suits the machine)
#   VENV=...        where to install
#   VENV_CUDA=...   where `make test-cuda` installs (otherwise .venv-cuda)
#   LANGUAGE=zh     `make notebook` opens the Chinese notebook
#   PYTHONS="..."   what `make test-matrix` runs on: versions such as 3.8, or paths

PYTHON ?=
VENV ?= .venv
VENV_CUDA ?= .venv-cuda
NUM_GPUS ?= 2
RANKS ?= 2
ARGS ?=
EXTRA ?=

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train train-mpi test test-faults test-cuda test-matrix notebook notebooks docs docs-serve pictures dist test-dist lint format data clean FORCE
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | \
	while read -r target text; do printf '  make %-11s %s\n' "$$target" "$$text"; done
	@sed -n 's/^#  / /p' $(firstword $(MAKEFILE_LIST))

# Arguments that say which data to use are the training script's business; fetching Fashion-MNIST
# first would be in the way of somebody who has none and asks for another data set.
train: $(VENV)/.runs $(if $(findstring --data,$(ARGS)),,data) ## train LeNet on NUM_GPUS devices
	$(BIN)/python scripts/train_lenet.py --num-gpus $(NUM_GPUS) $(ARGS)

# Each process gets its share of the processors; with more processes than those, none is bound.
# Open MPI wants root to say so.
PLACES = $(shell n=$$(nproc); if [ $(RANKS) -gt $$n ]; then echo --oversubscribe; \
	else echo --map-by slot:PE=$$((n / $(RANKS))):HWTCPUS; fi)
train-mpi: $(VENV)/.mpi $(if $(findstring --data,$(ARGS)),,data) ## the same in RANKS processes
	$(if $(filter 0,$(shell id -u)),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1) \
	$(BIN)/mpirun $(PLACES) -n $(RANKS) \
	$(BIN)/python scripts/train_lenet.py --num-gpus $(NUM_GPUS) $(ARGS)

data: $(VENV)/.runs ## find or download Fashion-MNIST
	$(BIN)/python scripts/get_data.py

test: lint ## lint, then run the tests and the docstrings' examples
	$(BIN)/python -m pytest

test-faults: $(VENV)/.tests ## 50 times kill -9 while training, and resume (`make test` does it 5 times)
	GLUONPAR_KILLS=50 $(BIN)/python -m pytest tests/training/test_resume.py -k kill_9

# The tests start what they examine with a stub driver; pytest itself has none, and so no gluonpar.
test-cuda: ## install mxnet-cu112 (2 GB) into VENV_CUDA and test it; no GPU is needed, but gcc
	@$(MAKE) --no-print-directory VENV=$(VENV_CUDA) EXTRA=cu112 $(VENV_CUDA)/.tests
	$(VENV_CUDA)/bin/python -m pytest --noconftest tests/runtime/test_cuda_wheel.py

# JupyterLab will not run as root unless it is told that this is meant.
notebook: $(VENV)/.notebook data ## open the walkthrough in JupyterLab
	$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) \
	notebooks/multi_gpu_walkthrough$(if $(filter zh%,$(LANGUAGE)),.zh-CN).ipynb

notebooks: $(VENV)/.tests data ## put the notebooks together from notebooks/walkthrough, and run them
	$(BIN)/python tools/build_notebooks.py $(ARGS)

docs: $(VENV)/.docs ## build the documentation into site/; a warning ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-serve: $(VENV)/.docs ## show the documentation on a local port, and what is changed in it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

test-matrix: ## run the tests on each Python 3.8 to 3.12 there is, with its oldest and newest NumPy
	$(or $(PYTHON),python3) tools/test_matrix.py $(if $(PYTHONS),--pythons '$(PYTHONS)') \
	$(if $(EXTRA),--extra $(EXTRA)) $(ARGS)

pictures: $(VENV)/.tests ## draw docs/pictures again; ARGS="--record timeline,scaling" measures first
	$(BIN)/python tools/draw_pictures.py $(ARGS)

dist: $(VENV)/.dist ## build an sdist, and from it a wheel, into dist/
	rm -rf build dist
	$(BIN)/python -m build --outdir dist

test-dist: $(VENV)/.dist ## install what is in dist/ in a fresh environment and run the tests on it
	$(BIN)/python tools/test_dist.py $(if $(EXTRA),--extra $(EXTRA)) $(ARGS)

lint: $(VENV)/.tests ## check style, format and the order of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(VENV)/.tests ## sort imports and format, in place
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

clean: ## remove the caches, and VENV if make made it
	rm -f $(VENV)/.runs $(VENV)/.tests $(VENV)/.mpi $(VENV)/.notebook $(VENV)/.docs $(VENV)/.dist
	rm -rf .matrix build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	[ ! -e $(VENV)/.made ] || grep -qx adopted $(VENV)/.made || rm -rf $(VENV)

# The set-up leaves stamps in VENV, so that a repeated `make` calls no pip: .made (the environment
# is whole), .runs, .mpi, .tests, .docs and .dist (what the targets need is installed), .extra
# (which MXNet it was).

# $(call stale,ASKED,FILE) is FORCE where the caller asks for something other than FILE records.
stale = $(if $(1),$(if $(filter $(1),$(shell cat $(2) 2>/dev/null)),,FORCE))

$(VENV)/.made: $(call stale,$(PYTHON),$(VENV)/.made)
	@tools/make_venv.sh '$(VENV)' '$(PYTHON)'

$(VENV)/.runs: $(VENV)/.made setup.py pyproject.toml $(call stale,$(EXTRA),$(VENV)/.extra)
	@$(call install,)
	@touch $@

$(VENV)/.tests: $(VENV)/.made setup.py pyproject.toml $(call stale,$(EXTRA),$(VENV)/.extra)
	@$(call install,$(comma)test)
	@touch $(VENV)/.runs $(VENV)/.mpi $@

$(VENV)/.mpi: $(VENV)/.made setup.py pyproject.toml $(call stale,$(EXTRA),$(VENV)/.extra)
	@$(call install,$(comma)mpi)
	@touch $(VENV)/.runs $@

$(VENV)/.notebook: $(VENV)/.made setup.py pyproject.toml $(call stale,$(EXTRA),$(VENV)/.extra)
	@$(call install,$(comma)notebook)
	@touch $(VENV)/.runs $(VENV)/.mpi $@

# The reference is made from the source as it lies there: MXNet is not needed.
$(VENV)/.docs: $(VENV)/.made setup.py pyproject.toml
	@$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

# Building needs nothing of gluonpar's: what it is built with comes into an environment of its own.
$(VENV)/.dist: $(VENV)/.made
	@$(BIN)/python -m pip install --quiet build
	@touch $@

# The tests and the notebook run the book's own code on gluonpar. d2l pins other versions than those it runs with here.
D2L := d2l==1.0.3

# The other MXNet goes first: both wheels install the same directory, and uninstalling one later
# would take the other's files with it.
install = set -e; \
	extra='$(EXTRA)'; \
	[ -n "$$extra" ] || extra=$$($(BIN)/python tools/choose_extra.py); \
	case $$extra in \
	cpu) other=mxnet-cu112 size=50\ MB ;; \
	cu112) other=mxnet size=2\ GB ;; \
	*) echo "EXTRA=$$extra: MXNet comes as cpu or cu112" >&2; exit 2 ;; \
	esac; \
	rm -f $(VENV)/.runs $(VENV)/.tests; \
	echo "installing gluonpar[$$extra$(1)] into $(VENV) (MXNet is a download of about $$size)"; \
	pip() { log=$$($(BIN)/python -m pip "$$@" 2>&1) || { echo "$$log" >&2; return 1; }; }; \
	pip uninstall --yes $$other; \
	pip install --quiet -e ".[$$extra$(1)]"; \
	$(if $(filter %test %notebook,$(1)),pip install --quiet --no-deps $(D2L);) \
	echo $$extra >$(VENV)/.extra
comma := ,
