# Two commands do everything: `make train` and `make test`.
#
#   make train      installs, trains shortly on whatever the machine has, scores the result
#   make test       installs, runs the tests of what a change most likely breaks
#   make test-all   the same and the slow ones
#
# Set PYTHON to choose an interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin

# With an NVIDIA GPU: its libraries, and the default of a tower for each GPU in sight.
# Without: four simulated towers.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
TOWERS := $(if $(filter 0,$(GPUS)),--num_gpus 4)
comma := ,
EXTRAS := $(if $(filter 0,$(GPUS)),dev,dev$(comma)gpu)

TRAIN_DIR ?= /tmp/cifar10_quickstart

.PHONY: train test test-all lint format soak clean

train: .venv/installed
	$(BIN)/python train_multi_gpu.py $(TOWERS) --batch_size 32 \
	  --max_steps 600 --checkpoint_steps 200 --train_dir $(TRAIN_DIR)
	$(BIN)/python eval.py --run_once --checkpoint_dir $(TRAIN_DIR)
	@echo "Look at the curves:  $(BIN)/tensorboard --logdir $(TRAIN_DIR)"

# Two processes; one that has nothing left takes tests from the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: .venv/installed
	$(PYTEST)

# And then what is slow.
test-all: test
	$(PYTEST) -m 'slow and not soak and not gpu and not peers'

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
