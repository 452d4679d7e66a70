# Needs Python 3.11 or newer and make; everything else goes into .venv.
#
#   make demo         turn a photo into a video, without a GPU and without weights
#   make check        lint, type-check and run the unit tests
#   make test         lint, type-check and run all tests but those marked long or nightly
#   make test-long    run the tests marked long
#   make test-nightly run the tests marked nightly: campaigns of faults, deployments, what needs the machine for itself
#   make test-all     run all three
#   make test-newest  run what `make test` runs, with the newest versions that pip finds
#   make test-oldest  the same with the oldest versions that pyproject.toml names
#   make dist         build the archives for an index into dist, and render a preview from each in a new environment
#   make docs         build the documentation into build/docs; broken links are errors
#   make gpu-check    measure what needs a GPU, into the folder gpu-check, which needs 64 GB
#   make lint         run the linters and type checkers only
#   make format       format the code
#   make constraints  update constraints.txt to the newest versions
#   make clean        remove everything that these targets have made

# Another Python, such as: make demo PYTHON=python3.12
PYTHON ?= python3
# Requirements that `make constraints` starts from, such as: make constraints PIN=torch==2.13.0
PIN ?=

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations 10
# Folders of tests that start no workers.
UNIT_TESTS := tests/cli tests/producer tests/pipeline tests/test_docs.py
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
DEVELOPMENT := '.[worker,serve,metrics,notify,plot]' --group dev

# spandrel is installed without torchvision, whose wheels may not load beside a torch from another index: the tests have a
# stand-in for the two functions that spandrel imports.

# Without byte code seven ranks would compile torch's Python sources at every start.
unexport PYTHONDONTWRITEBYTECODE
# Processes of tests keep the memory that they free: see worker/launcher/torchrun.py.
unit-tests tests test-long test-nightly test-newest test-oldest: export MALLOC_MMAP_THRESHOLD_ ?= 4000000000
unit-tests tests test-long test-nightly test-newest test-oldest: export MALLOC_TRIM_THRESHOLD_ ?= 4000000000

.PHONY: demo check unit-tests test tests test-long test-nightly test-all test-newest test-oldest dist docs gpu-check lint format constraints clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-worker
	@$(BIN)/python deploy/demo.py

# mypy uses one core, so lint runs beside the tests.
check:
	@$(MAKE) --no-print-directory -j2 lint unit-tests

unit-tests: $(VENV)/installed-dev
	$(PYTEST) -n 2 -m 'not slow and not long and not nightly' $(UNIT_TESTS)

test:
	@$(MAKE) --no-print-directory -j2 lint tests

tests: $(VENV)/installed-dev
	$(PYTEST) -n 4

test-long: $(VENV)/installed-dev
	$(PYTEST) -n 3 -m 'long and not nightly'

test-nightly: $(VENV)/installed-dev
	$(PYTEST) -n 0 -m nightly

test-all: test
	@$(MAKE) --no-print-directory test-long
	@$(MAKE) --no-print-directory test-nightly

test-newest test-oldest: test-%: $(VENV)/made
	@echo "Installing the $* versions of everything into build/$*; this takes a few minutes."
	@rm -rf build/$*
	@$(BIN)/python -m venv build/$*
	@$(if $(filter oldest,$*),$(BIN)/python deploy/oldest.py,:) > build/$*/versions
	@build/$*/bin/python -m pip install -qq --disable-pip-version-check 'pip>=25.1'
	@build/$*/bin/python -m pip install -qq --disable-pip-version-check -c build/$*/versions -e $(DEVELOPMENT) $(PIN)
	@build/$*/bin/python -m pip install -qq --disable-pip-version-check -c build/$*/versions --no-deps spandrel
	build/$*/bin/python -m pytest --dist loadfile --no-loadscope-reorder --durations 10 -n 4

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/made
	deploy/dist.sh $(BIN)/python

gpu-check: $(VENV)/installed-worker
	@$(INSTALL) -e '.[worker,gguf,int8,ltx]'
	$(BIN)/python deploy/gpu_check.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Programs in an environment name its Python by the whole path, so a checkout that was moved needs a new one.
MADE_IN := $(shell cat $(VENV)/made 2>/dev/null)
ifneq ($(or $(MADE_IN),$(CURDIR)),$(CURDIR))
.PHONY: $(VENV)/made
endif

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "svdq needs Python 3.11 or newer, and '$(PYTHON)' is not; name one that is: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(if $(MADE_IN),--clear) $(VENV)
	@pwd -P > $@

$(VENV)/installed-worker: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing svdq and torch into $(VENV); the first time takes a few minutes."
	@$(INSTALL) -e '.[worker]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing svdq, torch and the tools for testing into $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=25.1' # the first with --group
	@$(INSTALL) -e $(DEVELOPMENT)
	@$(INSTALL) --no-deps spandrel
	@touch $(VENV)/installed-worker $@

# The CUDA libraries and Triton, which torch brings on Linux, are left out: torch names their exact versions itself.
constraints: $(VENV)/made
	@echo "Installing the newest versions of everything into build/constraints; this takes a few minutes."
	@rm -rf build/constraints
	@$(BIN)/python -m venv build/constraints
	@build/constraints/bin/python -m pip install -qq --disable-pip-version-check 'pip>=25.1'
	@build/constraints/bin/python -m pip install -qq --disable-pip-version-check -e $(DEVELOPMENT) $(PIN)
	@build/constraints/bin/python -m pip install -qq --disable-pip-version-check --no-deps spandrel
	@build/constraints/bin/python -m pip freeze --exclude-editable > build/constraints/frozen
	@sed -n '/^#/p' constraints.txt > build/constraints/new
	@sed -e '/^#/d' -e '/ @ /d' -e '/^nvidia-/d' -e '/^cuda-/d' -e '/^triton==/d' -e 's/+[^+]*$$//' \
	  build/constraints/frozen >> build/constraints/new
	@cp build/constraints/new constraints.txt
	@rm -rf build/constraints
	@echo "Wrote constraints.txt; run 'make test' with it."

clean:
	@if [ -d demo-output/home ] && [ -x $(BIN)/svdq ]; then SVDQ_HOME=demo-output/home $(BIN)/svdq redis stop >/dev/null; fi
	rm -rf $(VENV) demo-output build dist svdq.egg-info .coverage
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
