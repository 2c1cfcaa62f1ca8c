# Every target makes what it needs: a virtual environment in .venv with Pippin and its tools.
#   make demo    install, fetch the small model, serve it, print an answered chat and the URL
#   make check   lint, types, import layers and the fast tests (about two minutes)
#   make test    everything
#   make docs    run the checks of docs/models.md's table and write it anew
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The one place that chooses torch's build. A release that has a CPU build at hand keeps a Linux
# machine without a GPU from fetching gigabytes of CUDA; with a GPU (or on a Mac) pip decides within
# the range of pyproject.toml.
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH := torch==2.13.0
endif
endif

.PHONY: demo check test lint docs bench clean

demo: $(VENV)/installed
	$(BIN)/pippin demo $(ARGS)

check: lint
	$(BIN)/python -m pytest -q -m "not model and not cluster and not slow" tests

test: lint
	$(BIN)/python -m pytest -q tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-dev
	-$(BIN)/python -m pytest -q --junit-xml=$(VENV)/checks.xml tests/backends/test_architectures.py \
		tests/backends/test_torch_models.py tests/backends/test_mlx_models.py \
		tests/backends/test_mlx_formats.py tests/backends/test_formats_gguf.py
	$(BIN)/python tests/backends/models_table.py $(VENV)/checks.xml

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH))
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
