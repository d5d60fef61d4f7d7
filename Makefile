# `make train` and `make test` install what they need; `make` alone lists the targets.

PYTHON ?= python3
# Pythons that have wheels of all packages, as in pyproject.toml.
FITS := import sys; sys.exit(not (3, 11, 4) <= sys.version_info < (3, 14))
BIN := .venv/bin

# A version other than that of constraints.txt: make clean test TENSORFLOW=2.22.0rc0
TENSORFLOW ?=

# The compute capability of each NVIDIA GPU, such as 8.0. Only targets that need it ask,
# once and with a time limit: with a broken driver, nvidia-smi may never answer.
SMI_SECONDS ?= 10
ASK := timeout -k 1 $(SMI_SECONDS) nvidia-smi --query-gpu=compute_cap --format=csv,noheader
GPUS = $(eval GPUS := $$(shell $(ASK) 2>/dev/null | grep -xE '[0-9]+\.[0-9]+'))$(GPUS)

# With GPUs: NVIDIA's libraries (the older cuDNN for all cards if one needs it), and one
# tower per GPU. Without GPUs: four simulated towers. A driver that does not answer is
# hidden from TensorFlow, which would wait for it too.
comma := ,
OLD = $(filter 6.% 7.0 7.2,$(GPUS))
EXTRAS = dev$(if $(GPUS),$(comma)gpu$(if $(OLD),-old))
DRIVER := /dev/nvidia0
SILENT = $(if $(GPUS),,$(wildcard $(DRIVER))$(shell command -v nvidia-smi))
TRAIN = train_multi_gpu.py $(if $(GPUS),,--num_gpus 4 )--global_batch_size $(IMAGES)
# About 128 images a step on any number of towers, as in docs/accuracy.md.
COUNT = $(if $(GPUS),$(words $(GPUS)),4)
IMAGES = $(shell echo $$((128 / $(COUNT) * $(COUNT))))
HIDE = $(if $(SILENT),CUDA_VISIBLE_DEVICES=-1 )

TRAIN_DIR ?= runs/quickstart
STEPS ?= 750
# Three scores make a curve: every 250 steps, and less where there are fewer.
EVAL_STEPS = $(shell echo $$((($(STEPS) + 2) / 3)))
REPORT := $(TRAIN_DIR)/report.html
IS_DONE := $(wildcard $(REPORT))

.PHONY: help train test test-all test-gpu mutants golden golden-write lint format docs \
  linkcheck soak clean

help:
	@echo "make train     installs, trains for a minute on the GPUs or the CPU, and shows"
	@echo "               the result; TRAIN_DIR=runs/another trains again"
	@echo "make test      installs, and runs the tests most likely to break"
	@echo "make test-all  runs these tests and the slow ones"
	@echo "make test-gpu  runs on the first GPU what make test-all runs on CPUs"
	@echo "make mutants   puts small faults into copies of the package; tests notice each"
	@echo "make golden    compares the results of fixed training runs with the records"
	@echo "make golden-write  records the results again; the commit says why"
	@echo "make lint      checks style, types and the imports between folders"
	@echo "make format    fixes the style"
	@echo "make docs      builds the documentation site and says where it is"
	@echo "make linkcheck checks every link of the site over the network"
	@echo "make soak      kills, full memory, cut networks, SLURM: 90 minutes, as root"
	@echo "make clean     removes .venv and caches, not runs/"
	@echo
	@echo "PYTHON chooses an interpreter: make train PYTHON=python3.12"

train: $(REPORT)
	@$(if $(IS_DONE),echo "$(TRAIN_DIR) was trained before; its report is $(REPORT)")
	@$(if $(IS_DONE),echo "To train again: make train TRAIN_DIR=$(TRAIN_DIR).1")
	@echo
	@! grep -q '"data_is_real": false' $(TRAIN_DIR)/config.json 2>/dev/null || \
	  echo "$(TRAIN_DIR) was trained on the stand-in, not on CIFAR-10; CIFAR10_DATA_DIR can name its folder."
	@echo "750 steps of 128 images: 57 % on CIFAR-10 is normal (docs/accuracy.md)."
	@echo "Next steps, with their time on two cores in bfloat16:"
	@echo "  source $(BIN)/activate"
	@echo "70 %, a minute:"
	@echo "  $(HIDE)python $(TRAIN) --max_steps 2000 --train_dir runs/one"
	@echo "86 %, 84 minutes: the same command with --max_steps 100000 continues from there."
	@echo "93 %, 5 minutes, and 94 % as the mean of six views:"
	@echo "  $(HIDE)python train.py --recipe fast --train_dir runs/fast"
	@echo "  $(HIDE)python eval.py --run_once --test_time_augmentation --train_dir runs/fast"
	@echo "Score and watch a training, in other terminals:"
	@echo "  $(HIDE)python eval.py --train_dir runs/one"
	@echo "  tensorboard --logdir runs"

# If interrupted, it continues from its last checkpoint.
$(REPORT): | .venv/installed
	@$(if $(SILENT),echo "NOTE: nvidia-smi reported no GPU within $(SMI_SECONDS) seconds: training on the CPU.")
	@$(if $(SILENT),echo "$(BIN)/python -m cifar10 doctor says why. After the fix: make clean train")
	@$(HIDE)$(BIN)/python $(TRAIN) \
	  --max_steps $(STEPS) --eval_steps $(EVAL_STEPS) --checkpoint_steps 200 \
	  --train_dir $(TRAIN_DIR)
	@$(HIDE)$(BIN)/python -m cifar10 report --train_dir $(TRAIN_DIR)

# Three processes keep two cores busy, since tests also wait. An idle process takes tests
# from a busy one.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

test: .venv/installed
	$(PYTEST)

# All tests, the slow ones included. The examples come last: with their packages, Keras
# imports scikit-learn and pandas too, and every program starts a third later.
EXAMPLES := tests/interface/test_examples.py
test-all: .venv/installed
	$(PYTEST) -m 'not soak and not gpu and not peers' --ignore $(EXAMPLES)
	$(MAKE) .venv/installed-examples
	$(PYTEST) -m slow $(EXAMPLES)

# One process, which splits the GPU.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu

# DRAW=100 SEED=1 draws 100 random mutants instead, to find what tests miss.
mutants: .venv/installed
	$(BIN)/python tests/mutants/run.py $(if $(DRAW),--draw $(DRAW) --seed $(or $(SEED),0))

golden: .venv/installed
	$(BIN)/python tests/golden/run.py

golden-write: .venv/installed
	$(BIN)/python tests/golden/run.py --write

# Lines of cifar10/. The number only falls; raising it takes a decision record.
MOST_LINES := 22308
LINES = $(shell find cifar10 -name '*.py' -exec cat {} + | wc -l)

lint: .venv/installed
	@test $(LINES) -le $(MOST_LINES) || \
	  { echo "cifar10/ has $(LINES) lines, $(MOST_LINES) are allowed: make it shorter (docs/decisions/0019)"; exit 1; }
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SPHINX := $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

docs: .venv/installed
	$(SPHINX)
	@echo "The site is build/docs/index.html. Open it in a browser, or serve it:"
	@echo "  $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8080"

linkcheck: .venv/installed
	$(SPHINX) -b linkcheck

# SOAK_KILLS random kills, 200 by default, take 40 minutes. Then used memory against the
# plan, on an idle machine, and as root cut networks (ip, iptables) and SLURM on them
# (apt-get install slurm-wlm munge).
soak: .venv/installed
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache

INSTALL = $(BIN)/python -m pip install --quiet --constraint .venv/constraints.txt --editable
# TensorFlow's release candidates bring keras-nightly, which installs into Keras's folder.
ONE_KERAS = @$(BIN)/pip freeze | grep ^keras-nightly | xargs -r sh -c \
  '$(BIN)/pip uninstall -qy keras && $(BIN)/pip install -q --no-deps --force-reinstall $$0'

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(FITS)' 2>/dev/null || { echo "$(PYTHON) is not a Python from 3.11.4 to 3.13," \
	  "which TensorFlow needs ($$($(PYTHON) --version 2>&1 | tail -n 1)): get one, for example by" \
	  "'uv python install 3.13', and name it: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing into .venv (TensorFlow alone is a download of 600 MB) ..."
	$(PYTHON) -m venv .venv
	grep -vE '$(if $(TENSORFLOW),^(tensorflow|keras)==,^#)' constraints.txt > .venv/constraints.txt
	$(INSTALL) '.[$(EXTRAS)]' $(if $(TENSORFLOW),tensorflow==$(TENSORFLOW))
	$(ONE_KERAS)
	touch $@

# Packages of the examples, such as MLflow. Training does not need them.
.venv/installed-examples: .venv/installed
	$(INSTALL) '.[examples]'
	$(ONE_KERAS)
	touch $@
