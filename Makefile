# `make train` and `make test` install what they need; `make` alone lists the targets.

PYTHON ?= python3
BIN := .venv/bin

# With an NVIDIA GPU: its libraries, and the default of a tower for each GPU in sight.
# Without: four simulated towers.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
TOWERS := $(if $(filter 0,$(GPUS)),--num_gpus 4)
comma := ,
EXTRAS := $(if $(filter 0,$(GPUS)),dev,dev$(comma)gpu)

TRAIN_DIR ?= runs/quickstart
STEPS ?= 750
REPORT := $(TRAIN_DIR)/report.html
IS_DONE := $(wildcard $(REPORT))

.PHONY: help train test test-all test-gpu mutants lint format soak clean

help:
	@echo "make train     installs, trains for a minute on whatever the machine has, shows"
	@echo "               how well it went; TRAIN_DIR=runs/another trains another time"
	@echo "make test      installs, runs the tests that a change most likely breaks"
	@echo "make test-all  the same and the slow ones"
	@echo "make test-gpu  runs on the first GPU what make test-all runs on CPUs"
	@echo "make mutants   puts small faults into copies of the package; tests notice each"
	@echo "make lint      checks style, types and which folder imports which"
	@echo "make format    mends the style"
	@echo "make soak      kills, full memory, networks that are cut: an hour, as root"
	@echo "make clean     removes .venv and caches, not runs/"
	@echo
	@echo "PYTHON chooses an interpreter: make train PYTHON=python3.12"

train: $(REPORT)
	@$(if $(IS_DONE),echo "$(TRAIN_DIR) was trained before; its page is $(REPORT)")
	@$(if $(IS_DONE),echo "To train again: make train TRAIN_DIR=$(TRAIN_DIR).1")
	@echo
	@echo "Next, to train on CIFAR-10 for real, and to score and watch that:"
	@echo "  source $(BIN)/activate"
	@echo "  python train_multi_gpu.py $(TOWERS)"
	@echo "  python eval.py"
	@echo "  tensorboard --logdir runs"

# Interrupted, it goes on from its last checkpoint.
$(REPORT): | .venv/installed
	@$(BIN)/python train_multi_gpu.py $(TOWERS) --batch_size 32 \
	  --max_steps $(STEPS) --checkpoint_steps 200 --train_dir $(TRAIN_DIR)
	@$(BIN)/python -m cifar10 report --train_dir $(TRAIN_DIR)

# Three processes keep two cores busy, as tests also wait; one that has nothing left
# takes tests from another.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

test: .venv/installed
	$(PYTEST)

# And then what is slow, the examples among it.
test-all: test .venv/installed-examples
	$(PYTEST) -m 'slow and not soak and not gpu and not peers'

# One process: the tests divide the GPU among them.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu

mutants: .venv/installed
	$(BIN)/python tests/mutants/run.py

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# SOAK_KILLS kills at random moments, 200 unless set: 40 minutes. Memory against its plan,
# which only an idle machine shows. Networks that are cut, as root.
soak: .venv/installed
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/installed: pyproject.toml constraints.txt
	@echo "Installing into .venv (TensorFlow alone is a download of 600 MB) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# What the examples use, MLflow and others; training does without.
.venv/installed-examples: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples]'
	touch $@
