# make demo, make test and make lint need nothing but a Python 3.12 or newer somewhere on the machine.
# PYTHON=/path/to/python chooses one; PYTEST_ARGS="tests/test_config.py -x" runs a part of the tests.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup cuda demo test lint requirements clean

VENV := .venv
BIN := $(VENV)/bin
DEMO := demo_output
PYTEST_ARGS ?=
WORKERS ?= 2
export TF_CPP_MIN_LOG_LEVEL ?= 2
demo: export JAX_PLATFORMS = cpu

help:
	@echo "make setup         make $(VENV) with everything in it (the others do that when it is needed)"
	@echo "make cuda          add what NVIDIA GPUs need (CUDA 13)"
	@echo "make demo          small FP8 checkpoint -> convert -> verify -> one answer, in $(DEMO)/"
	@echo "make test          the tests, on 8 fake CPU devices"
	@echo "make lint          ruff and pyright"
	@echo "make requirements  write requirements.txt again from pyproject.toml"
	@echo "make clean         remove $(VENV) and $(DEMO)"

setup: $(VENV)/.installed

# A candidate counts if it starts, is new enough and can make environments with pip: pyenv's shims may exist and fail.
$(VENV)/.installed: requirements.txt pyproject.toml
	@found=; \
	for python in $(PYTHON) python3.12 python3.13 python3.14 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python3; do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python 3.12 or newer with venv and pip was found. Install one (Debian, Ubuntu: apt-get install python3.12-venv;" >&2; \
	  echo "pyenv: pyenv install 3.12; uv: uv python install 3.12) and run make again, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version) ($$found)"; \
	"$$found" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . --config-settings editable_mode=compat
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"; \
	fi
	@touch $@

# On a machine with NVIDIA GPUs: what JAX and the kernels need to run on them.
cuda: setup
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[cuda]' --config-settings editable_mode=compat

demo: setup
	@rm -rf $(DEMO)
	@mkdir -p $(DEMO)
	@echo "== A small checkpoint in the public format, with random weights: its answer will be noise"
	$(BIN)/python scripts/make_tiny_checkpoint.py --config=configs/tiny.json --save_path=$(DEMO)/hf --num_shards=4
	@echo "== Convert it"
	$(BIN)/python scripts/convert.py --hf_ckpt_path=$(DEMO)/hf --save_path=$(DEMO)/ckpt
	@echo "== Compare every tensor with its source, bit for bit"
	$(BIN)/python scripts/verify.py --hf_ckpt_path=$(DEMO)/hf --ckpt_path=$(DEMO)/ckpt
	@echo "== Ask it something; the text is streamed as it is made"
	printf 'What is the capital of France?\n/exit\n' | $(BIN)/python scripts/generate.py --ckpt_path=$(DEMO)/ckpt --interactive --max_new_tokens=32 --max_seq_len=128

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python

requirements: setup
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m uv pip compile --quiet --universal --python-version=3.12 --extra=test --no-emit-index-url --no-header \
	  --no-annotate --output-file=requirements.txt pyproject.toml

clean:
	rm -rf $(VENV) $(DEMO)
