# make train: install everything into .venv, then train on two Horovod ranks. make test, make lint, make docs, make bench likewise.
PYTHON ?= python3
# Relative: make cuts names at spaces, and the checkout's path may have some.
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
OUTPUT ?= runs/python-docs
# ruff reads no setup.cfg; this is its only caller.
RUFF := --line-length 120 --target-version py310 --no-cache
# Debian's archive keeps no old versions to pin; pip's cache is a mount, no part of a layer.
HADOLINT := --ignore DL3008 --ignore DL3042
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Open MPI refuses to run as root (containers, CI) unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
# mpirun wants ssh even on a single host, where it does not use it.
export OMPI_MCA_plm_rsh_agent ?= ssh : rsh : false

# `HOROVOD_GPU_OPERATIONS=NCCL make install` builds Horovod for GPUs. The stamp holds the value: where the variable is
# not set, Horovod stays as it is installed; set to nothing, it is built for CPUs again.
STAMP := $(VENV)/installed
INSTALLED_GPU_OPERATIONS := $(shell cat $(STAMP) 2>/dev/null)
HOROVOD_GPU_OPERATIONS ?= $(INSTALLED_GPU_OPERATIONS)
ifneq ($(HOROVOD_GPU_OPERATIONS),$(INSTALLED_GPU_OPERATIONS))
.PHONY: $(STAMP)
endif

# What `make test` leaves out, and how often a fault is made where it takes its time.
LONG := EVERY_CASE=1 EVERY_PAIR=1 FAULT_REPEATS=3
SLOWEST := --durations=20 --durations-min=1

.PHONY: train test unit-tests distributed-tests test-gpu test-all slow-unit-tests slow-distributed-tests test-docker lint docs \
	bench dist horovod-wheels install clean

train: install
	horovodrun -np 2 -H localhost:2 hvd-train --preset python-docs output_dir=$(OUTPUT)

# Both halves, also where the first one fails; the tests marked `slow` are left out.
test: install
	$(MAKE) --keep-going -j1 unit-tests distributed-tests

# Three at a time on two cores, as many wait; the tests that start real ranks share the cores themselves.
unit-tests: install
	$(BIN)/python -m pytest -m "not distributed and not slow" -n 3 --dist loadfile --no-loadscope-reorder $(SLOWEST) $(PYTEST_ARGS)

distributed-tests: install
	$(BIN)/python -m pytest -m "distributed and not slow" $(SLOWEST) $(PYTEST_ARGS)

# Everything that one GPU can show. It needs no Horovod: where there is no .venv, PYTHON is one with pytest and the
# package's requirements.
test-gpu:
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

# Everything, before a release: up to three hours.
test-all: install
	$(MAKE) --keep-going -j1 slow-unit-tests slow-distributed-tests test-docker

slow-unit-tests: install
	$(LONG) $(BIN)/python -m pytest -m "not distributed" -n 3 --dist loadfile --no-loadscope-reorder $(SLOWEST) $(PYTEST_ARGS)

slow-distributed-tests: install
	$(LONG) $(BIN)/python -m pytest -m distributed $(SLOWEST) $(PYTEST_ARGS)

# The cluster of docker/compose.yaml on a Docker engine, which it starts itself where it is root and there is none.
test-docker: install
	$(BIN)/python -m pytest tests/docker $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check $(RUFF) --select E,F,W,I,B,UP,SIM,RET,C4,PTH,PIE .
	$(BIN)/ruff format $(RUFF) --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck docker/*.sh .ci/*
	$(BIN)/hadolint $(HADOLINT) docker/Dockerfile.*

# The site, into site/. A broken link, a missing anchor or a page that is not in the navigation fails.
docs: install
	$(BIN)/python -m mkdocs build --strict --quiet

bench: install
	for model in small medium large; do $(BIN)/python -m benchmarks.data_parallel --model $$model || exit; done
	for model in small medium; do $(BIN)/python -m benchmarks.one_rank --model $$model || exit; done
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.partition
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.sharded
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.wake_up

# The package's own sdist and wheel. Built with the setuptools of .venv, so that nothing is fetched.
dist: install
	rm -f dist/hvd_transformer-*
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/hvd_transformer-*

# Horovod for CPUs and, with HOROVOD_GPU_OPERATIONS=NCCL, for GPUs too. The wheels have the same name: the folder says
# which torch, Python and MPI a wheel is for. auditwheel says which glibc it needs. .venv keeps the Horovod that it has.
horovod-wheels:
	$(MAKE) install HOROVOD_GPU_OPERATIONS='$(INSTALLED_GPU_OPERATIONS)'
	for operations in '' $(HOROVOD_GPU_OPERATIONS); do \
		wheel=$$(HOROVOD_GPU_OPERATIONS=$$operations bash docker/build_horovod.sh $(BIN)/python) || exit; \
		folder=dist/$$(basename "$$(dirname "$$wheel")"); \
		mkdir -p "$$folder" && cp "$$wheel" "$$folder" || exit; \
		$(BIN)/python -m auditwheel show "$$folder/$$(basename "$$wheel")" || exit; \
	done

install: $(STAMP)

# torch comes before the rest: Horovod is compiled against the one that is installed.
$(STAMP): setup.cfg constraints.txt docker/build_horovod.sh $(wildcard docker/patches/*.patch)
	@HOROVOD_GPU_OPERATIONS='$(HOROVOD_GPU_OPERATIONS)' bash docker/build_horovod.sh --check $(PYTHON)
	@echo "Installing into .venv (first time: some minutes, most of it downloads and the Horovod build)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[distributed,service,build,dev$(if $(HOROVOD_GPU_OPERATIONS),$(COMMA)cuda)]'
	wheel=$$(HOROVOD_GPU_OPERATIONS='$(HOROVOD_GPU_OPERATIONS)' bash docker/build_horovod.sh $(BIN)/python) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$$wheel"
	@echo '$(HOROVOD_GPU_OPERATIONS)' >$@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
