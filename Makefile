# make demo | test | check | setup | proto | clean. Each target first installs what it needs into .venv.
# PYTHON=python3.12 picks the interpreter, PIP_ARGS="..." adds arguments to every pip install.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
PACKAGES := kvrelay coordinator worker prefill_svc decode_svc kvtransfer engine
# Tests that start whole clusters have the machine for themselves; all others share it by two.
CLUSTER_TESTS := tests/e2e tests/faults
PROTOS := $(wildcard proto/kvrelay/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: help setup dev model demo test check proto clean

help:
	@sed -n '1,2s/^# //p' Makefile

setup: .venv/.setup
dev: .venv/.dev

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "KVRelay needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot make a virtual environment; Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

.venv/.setup: .venv/.python pyproject.toml
	@echo "installing into .venv: minutes the first time" >&2
	$(PIP) -e ".[worker,models,http]"
	@$(BIN)/python -m compileall -q $(PACKAGES)
	@$(BIN)/python -m engine.native.build >&2 || echo "no native attention kernel: using the reference one, slower" >&2
	@touch $@

.venv/.dev: .venv/.setup
	$(PIP) -e ".[worker,models,http,dev]"
	@touch $@

model: .venv/.setup
	@$(BIN)/kvrelay models pull > /dev/null

demo: .venv/.setup model
	@$(BIN)/python -m kvrelay.cli.main demo

test: .venv/.dev model
	$(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix --ignore=,$(CLUSTER_TESTS))
	$(BIN)/python -m pytest $(CLUSTER_TESTS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	@rm -rf build/proto && mkdir -p build/proto && $(call PROTOC,build/proto)
	@for file in build/proto/kvrelay/v1/*; do cmp "$$file" "kvrelay/v1/$$(basename "$$file")" \
		|| { echo "generated code is not up to date: make proto" >&2; exit 1; }; done

proto: .venv/.dev
	$(call PROTOC,.)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
