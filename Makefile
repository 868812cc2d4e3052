# make demo     set up and run the tour         make lint   style, types, imports between packages
# make test     set up and run the tests        make bench  measure the metrics of docs/figures.md
# make e2e      those with browsers, ssh servers, PostgreSQL, several nodes, an autoscaler
# make package  build sdist and wheel, try them in an empty environment; DEMO=1: with the demo
# make compat   set up torch 2.14, TorchRec 1.9 and newer libraries, and run the tests there
# make chaos    kill processes and fill disks at random while commands run: 45 minutes
# make doctor   say what this machine can measure, and what is missing
# make mlflow   browse the runs of mlflow.db; make mlflow STORE=sqlite:///demo/mlflow.db others

# Whichever of these the machine has, and starts: what a version manager puts there may not.
FOUND  := $(foreach minor,11 12 13,$(shell python3.$(minor) -c 'print("python3.$(minor)")' 2>/dev/null))
PYTHON ?= $(or $(firstword $(FOUND)),python3.11)
VENV   := .venv
BIN    := $(VENV)/bin
# Which build of fbgemm: that for NVIDIA GPUs where there is one.
EXTRA  ?= $(if $(wildcard /dev/nvidia[0-9]*),gpu,cpu)
# Which torch, with the fbgemm and the TorchRec that match it: 2.13 or 2.14.
TORCH  ?= 2.13
PINS   := constraints/torch-$(TORCH).txt
PAIR   := $(EXTRA)$(if $(filter-out 2.13,$(TORCH)),-torch$(subst .,,$(TORCH)))
READY  := $(VENV)/.ready-$(PAIR)

# Whose runs make mlflow shows, and where.
STORE  ?= $(or $(MLFLOW_TRACKING_URI),sqlite:///mlflow.db)
PORT   ?= 5000

.PHONY: setup doctor demo test e2e lint package compat bench chaos gate gpu-check gpu-wheels \
	gpu-train-kit mlflow clean

setup: $(READY)

$(READY): pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c $(PINS) -e '.[$(PAIR),dev,torchrec]'
	$(BIN)/pip install --quiet -c $(PINS) --no-deps torchrec # it asks for fbgemm's CUDA build
	mkdir -p $(VENV)/names # where mypy finds this folder under the name that it is installed by
	ln -sfn ../.. $(VENV)/names/autoshard
	touch $@

doctor: setup
	$(BIN)/python experiments/doctor.py

demo: setup
	$(BIN)/python experiments/demo.py

# Two sessions of tests side by side, on one core, too: a good part of a test is to wait for
# processes. Each needs some 6 GB, so there is one where memory is short. Tests of a file stay
# together, for they share what is costly. In the order of their names quick files come last, so
# that sessions end at about the same time; in tests/e2e those with few tests do.
SESSIONS     ?= $(shell awk '/MemTotal/ {print $$2 < 12e6 ? 1 : 2}' /proc/meminfo)
SIDE_BY_SIDE := -n $(SESSIONS) --dist loadfile
# Threads of torch and NumPy wait for each other in loops. Where sessions and their actors share the
# cores, that took tests up to four times the processor time.
ONE_THREAD   := OMP_NUM_THREADS=1

test: setup
	$(ONE_THREAD) $(BIN)/python -m pytest $(SIDE_BY_SIDE) --no-loadscope-reorder --ignore=tests/e2e

e2e: setup
	$(ONE_THREAD) $(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/e2e

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Some 2 GB are installed, in a folder for temporary files.
package:
	$(PYTHON) tests/try_package.py $(if $(DEMO),--demo)

# In an environment of its own, with the newest Python that is here and starts.
NEWEST = $(foreach minor,13 12 11,$(shell python3.$(minor) -c 'print("python3.$(minor)")' 2>/dev/null))
compat:
	$(MAKE) test VENV=.venv-compat TORCH=2.14 EXTRA=cpu PYTHON=$(firstword $(NEWEST))

# What doctor says of a machine with GPUs, and the tests that need them, in a file to send.
gpu-check: setup
	-$(BIN)/python experiments/doctor.py > gpu-report.txt 2>&1
	-$(BIN)/python -m pytest -m gpu -rA --ignore=tests/e2e >> gpu-report.txt 2>&1
	@tail -3 gpu-report.txt; echo 'the report is in gpu-report.txt'

# Check that the CUDA wheels install and load, without a GPU: 3 GB are downloaded.
gpu-wheels:
	$(PYTHON) tests/gpu_wheels.py

# Pack what trains by plans on a GPU machine without an index, in .gpu-train: 90 MB are downloaded.
gpu-train-kit: setup
	$(BIN)/python tests/gpu_train_kit.py

bench: setup
	$(BIN)/python tests/run_bench.py

# AUTOSHARD_KILLS: how many faults; AUTOSHARD_SEED: others than last time.
chaos: setup
	$(BIN)/python tests/run_bench.py --only chaos

gate: setup
	$(BIN)/python tests/bench/gate.py $(BASE)

mlflow: setup
	@case '$(STORE)' in \
	http*) echo 'the runs are on a server: open $(STORE)' ;; \
	*) $(BIN)/mlflow ui --backend-store-uri '$(STORE)' --port $(PORT) ;; \
	esac

clean:
	rm -rf $(VENV) .venv-compat build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
