# Needs Python 3.11 or newer and make; everything else goes into .venv.
#
#   make demo         a photo becomes a video here, with no GPU and no weights
#   make test         lint, type-check and test
#   make test-long    the tests that wait so long that `make test` leaves them out, such as for cron and for leases
#   make gpu-check    what only a machine with a GPU can tell, into gpu-check.md; MODEL=DIR for a model with weights
#   make lint         the checks of `make test` without the tests
#   make format       lay out the code
#   make constraints  write constraints.txt anew, with the newest versions
#   make clean        remove what the above have made

# Another Python, such as: make demo PYTHON=python3.12
PYTHON ?= python3
# Requirements that `make constraints` starts from, such as: make constraints PIN=torch==2.13.0
PIN ?=

VENV := .venv
BIN := $(VENV)/bin
# Errors only: pip also warns of what is none of ours to mend, such as folders of packages that are not there.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Without byte code seven ranks would compile torch's Python sources at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long gpu-check lint format constraints clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-worker
	@$(BIN)/python deploy/demo.py

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m long

gpu-check: $(VENV)/installed-worker
	$(BIN)/python deploy/gpu_check.py $(if $(MODEL),--model $(MODEL))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "svdq needs Python 3.11 or newer, and '$(PYTHON)' is not; name one that is: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed-worker: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing svdq and torch into $(VENV); the first time takes a few minutes."
	@$(INSTALL) -e '.[worker]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing svdq, torch and the tools for testing into $(VENV); the first time takes a few minutes."
	@$(INSTALL) -e '.[worker,dev]'
	@touch $(VENV)/installed-worker $@

# The CUDA libraries and Triton, which torch brings on Linux, are left out: torch names their exact versions itself.
constraints: $(VENV)/made
	@echo "Installing the newest versions of everything into build/constraints; this takes a few minutes."
	@rm -rf build/constraints
	@$(BIN)/python -m venv build/constraints
	@build/constraints/bin/python -m pip install -qq --disable-pip-version-check -e '.[worker,dev]' $(PIN)
	@build/constraints/bin/python -m pip freeze --exclude-editable > build/constraints/frozen
	@sed -n '/^#/p' constraints.txt > build/constraints/new
	@sed -e '/^#/d' -e '/ @ /d' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' -e 's/+[^+]*$$//' \
	  build/constraints/frozen >> build/constraints/new
	@cp build/constraints/new constraints.txt
	@rm -rf build/constraints
	@echo "Wrote constraints.txt; run 'make test' with it."

clean:
	@if [ -d demo-output/home ] && [ -x $(BIN)/svdq ]; then SVDQ_HOME=demo-output/home $(BIN)/svdq redis stop >/dev/null; fi
	rm -rf $(VENV) demo-output build svdq.egg-info .coverage
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
