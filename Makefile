# `make train` and `make test` set everything up themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-all check format bench bench-tensor bench-averaging bench-memory averaging-data clean

train: $(VENV)/.installed
	$(BIN)/ganglion train --nproc 2 $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev
	GANGLION_HYPOTHESIS=thorough $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/pure/test_layers.py tests/pure/test_sizes.py tests/pure/test_architecture.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.data_parallel $(ARGS)

bench-tensor: $(VENV)/.installed
	$(BIN)/python -m benchmarks.tensor $(ARGS)

# ARGS="--part wall" has real processes and slow links, ARGS="--part paper" the virtual clock.
bench-averaging: $(VENV)/.installed
	$(BIN)/python -m benchmarks.averaging $(ARGS)

bench-memory: $(VENV)/.installed
	$(BIN)/python -m benchmarks.memory $(ARGS)

averaging-data:
	apt-get install -y dataset-fashion-mnist

# torch comes first and pinned: a looser pin pulls gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
