# `make help` lists the targets. PYTHON is the interpreter that makes the virtual environment and that gpu-check uses as it is.
PYTHON ?= python3
VENV   ?= .venv
IN     := $(VENV)/bin/python
SET_UP := $(VENV)/.set-up

# A pipeline fails when any part of it does.
SHELL         := bash
.SHELLFLAGS   := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench bench-peers bench-overhead bench-report bench-smoke bench-train gpu-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(SET_UP) ## Make .venv, install everything into it, build the host library; quick when nothing changed
	@$(IN) pynccl/host/build.py

$(SET_UP): setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(IN) -m pip install --quiet --disable-pip-version-check --editable '.[cuda12,demo,dev,test]'
	@touch $@

demo: setup ## Show it: collectives between processes and a small training, results in build/demo
	$(IN) -m examples.demo

test: setup ## Run all tests that need no GPU, with the C-level stress under sanitizers
	$(IN) -m pytest

lint: setup ## Check formatting, lint, types, and the C sources with warnings as errors
	$(IN) -m ruff format --check .
	$(IN) -m ruff check .
	$(IN) -m mypy
	$(IN) pynccl/host/build.py --werror --out build/lint/lib --objects build/lint

bench: setup ## Sweep all_reduce over sizes on 2 ranks, results in build/bench (all_reduce, -2, ..)
	@mkdir -p build/bench
	@name=build/bench/all_reduce; number=1; while [ -e $$name.json ] || [ -e $$name.txt ]; do \
	  number=$$((number + 1)); name=build/bench/all_reduce-$$number; done; \
	$(IN) -m bench.all_reduce_perf -b 8 -e 64M -f 2 -g 2 -J $$name.json | tee $$name.txt

bench-peers: setup ## Compare with Open MPI, MPICH and Gloo (installs them for themselves), results in build/bench
	@mkdir -p build/bench
	$(IN) -m bench.peers --load 0,1 --json build/bench/peers.json | tee build/bench/peers.txt

bench-overhead: setup ## Time calls with the communication taken away, and the import, results in build/bench
	@mkdir -p build/bench
	$(IN) -m bench.call_overhead --json build/bench/call_overhead.json | tee build/bench/call_overhead.txt

# Nothing overwrites the files of an earlier `make bench`: all_reduce.txt and .json, all_reduce-2.txt and .json, ..
# Oldest first: it is what the others are compared with.
RESULTS = $(shell ls -1tr build/bench/all_reduce*.json 2>/dev/null) $(wildcard build/bench/peers.json build/bench/call_overhead.json)
bench-report: setup ## Lay what bench, bench-peers and bench-overhead found side by side on a page, build/bench/report
	@test -n "$(strip $(RESULTS))" || { echo "nothing in build/bench yet: make bench, bench-peers or bench-overhead first"; exit 1; }
	$(IN) -m bench.report $(RESULTS) --out build/bench/report

bench-smoke: setup ## Print a few figures beside those of bench/baseline.json; under a minute
	$(IN) -m bench.smoke

bench-train: setup ## Compare a sharded training step with torch's FSDP2 and DDP (installs torch for itself)
	@mkdir -p build/bench
	$(IN) -m bench.train_step --layers 8 --width 2048 --batch 64 --ranks 2 --peers fsdp2,ddp --json build/bench/train_step.json

# Installs nothing and needs no network: whatever CuPy and libnccl $(PYTHON) has. New NCCLs refuse two ranks on one GPU
# unless told otherwise. Only the files with GPU tests are read: the others may import what that Python lacks.
gpu-check: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check: export NCCL_MULTI_RANK_GPU_ENABLE := 1
gpu-check: ## On a GPU machine, with PYTHON as it is: the tests marked gpu, then sweeps on its libnccl
	$(PYTHON) -m pynccl.host.build
	$(PYTHON) -m pynccl
	$(PYTHON) -m pytest -m gpu $$(grep -rl --include='*.py' 'mark\.gpu' tests)
	PYNCCL_LIBRARY=nccl $(PYTHON) -m bench.all_reduce_perf -b 8 -e 64M -f 8 -g 2
	PYNCCL_LIBRARY=nccl $(PYTHON) -m bench.all_reduce_perf -b 8 -e 64M -f 8 -g 4
	for program in all_gather reduce_scatter broadcast reduce alltoall alltoallv gather scatter sendrecv hypercube; do \
	  PYNCCL_LIBRARY=nccl $(PYTHON) -m bench $$program -b 8 -e 1M -f 32 -g 2 || exit 1; done

clean: ## Remove everything that the other targets made, .venv included
	rm -rf $(VENV) build dist pynccl/host/lib *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
