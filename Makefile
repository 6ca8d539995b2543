# Two commands do everything on a machine that has only Python 3.11+, make and git:
#   make demo    train XMoCo on the embedded images and compare it with MoCo v2+ (about 4 minutes on two cores)
#   make test    style, types and tests
# On a machine with a GPU, make test-gpu runs the tests that need one.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
# Packages are installed uncompiled. Python is to keep what it compiles of them, whatever the shell
# says: otherwise every process that the tests start does it again, for seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-gpu lock format
demo: $(READY)
	$(BIN)/xmoco demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# What needs CUDA, by .venv's Python or, where there is none, by one that has all packages already.
test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_tests.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Versions and hashes of everything, for every platform; run after changing pyproject.toml.
lock: $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --quiet --output-file requirements.lock

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xmoco needs Python 3.11 or newer; say which with: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(READY): requirements.lock pyproject.toml | $(BIN)/uv
	@echo "setting up .venv: a few gigabytes to fetch the first time"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@
