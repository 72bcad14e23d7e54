# Everything runs from a fresh clone with nothing but Python 3.11, pip and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv demo demo-policies demo-codecs test test-all test-gpu test-docker lint format protos check-protos bench chaos clean

venv: $(STAMP)  ## the environment in .venv; does nothing if it is up to date

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: venv  ## trains a CNN on MNIST with 2 servers and 2 trainers; results in runs/mnist
	$(BIN)/pserver launch --servers 2 --trainers 2 workers/mnist.py -- --out runs/mnist

demo-policies: venv  ## MNIST under each sync policy with one slow trainer; picture and table in runs/policies
	$(BIN)/python workers/compare_policies.py --out runs/policies

demo-codecs: venv  ## MNIST with each codec for gradients; picture and table in runs/codecs
	$(BIN)/python workers/compare_codecs.py --out runs/codecs

test: venv  ## the default suite, a file at a time in each of two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: venv  ## the default suite and what is slow
	$(BIN)/python -m pytest -m 'not gpu'

test-gpu: venv  ## what needs a CUDA device; says "not run" without one
	$(BIN)/python tests/gpu/run.py

test-docker: venv  ## docker/compose.yaml in real containers; without a Docker daemon, root starts one for the test
	$(BIN)/python -m tests.docker

lint: venv  ## ruff, and mypy strict on pserver/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## rewrites the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: venv  ## regenerates pserver/transport/gen
	$(BIN)/python protos/generate.py

check-protos: protos  ## fails if the generated code is not what the .proto files say
	git diff --exit-code -- pserver/transport/gen

bench: venv  ## every benchmark; figures and charts in runs/bench
	mkdir -p runs/bench
	for name in $$($(BIN)/python -m benchmarks --list | cut -d ' ' -f 1); do \
		$(BIN)/python -m benchmarks $$name --json runs/bench/$$name.json --png runs/bench/$$name.png || exit 1; \
	done

DURATION ?= 300

chaos: venv  ## trains for DURATION seconds while processes are killed, stopped and cut off; SEED=... replays a run
	$(BIN)/python -m tests.chaos --duration-s $(DURATION) $(if $(SEED),--seed $(SEED))

clean:  ## removes the environment, caches and results
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
