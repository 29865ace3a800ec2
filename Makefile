# make train: install everything into .venv, then train on two Horovod ranks. make test, make lint, make bench likewise.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
OUTPUT ?= runs/python-docs
# ruff reads no setup.cfg; this is its only caller.
RUFF := --line-length 120 --target-version py310 --no-cache
# Debian's archive keeps no old versions to pin; pip's cache is a mount, no part of a layer.
HADOLINT := --ignore DL3008 --ignore DL3042
export PATH := $(BIN):$(PATH)
# Open MPI refuses to run as root (containers, CI) unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1

.PHONY: train test test-docker lint bench install clean

train: install
	horovodrun -np 2 -H localhost:2 hvd-train --preset python-docs output_dir=$(OUTPUT)

# The tests that start real ranks share the cores themselves; of the others two run at a time.
test: install
	$(BIN)/python -m pytest -m "not distributed" -n 2 --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m distributed $(PYTEST_ARGS)

# The cluster of docker/compose.yaml on a Docker engine, which it starts itself where it is root and there is none.
test-docker: install
	$(BIN)/python -m pytest tests/docker $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check $(RUFF) --select E,F,W,I,B,UP,SIM,RET,C4,PTH,PIE .
	$(BIN)/ruff format $(RUFF) --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck docker/*.sh .ci/run
	$(BIN)/hadolint $(HADOLINT) docker/Dockerfile.*

bench: install
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.partition
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.sharded

install: $(VENV)/installed

# torch comes before the rest: Horovod is compiled against the one that is installed.
$(VENV)/installed: setup.cfg constraints.txt docker/build_horovod.sh
	@echo "Installing into .venv (first time: some minutes, most of it downloads and the Horovod build)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[distributed,build,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
		"$$(bash docker/build_horovod.sh $(BIN)/python)"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
