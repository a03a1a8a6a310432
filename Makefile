# Two commands need no other set-up: `make train` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With an NVIDIA GPU that answers, the CUDA build of torch; without one, the CPU build.
PLATFORM ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
CONSTRAINTS := constraints/$(PLATFORM).txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip would compile on one core. Some packages carry files for other versions of Python, which do not compile; of
# pulumi_aws, a third of all that there is, a program imports a small part, which Python compiles then.
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x /pulumi_aws/ $(VENV)/lib || true
ARGS ?=

.PHONY: help train test test-here test-hosts test-images test-vm lint lint-types lint-imports lint-playbooks format golden infra-demo wheelhouse pins install dev clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: install  ## train the demo here (ARGS="--set training.max_steps=1000" changes it)
	@$(BIN)/fab train $(ARGS)

test: dev  ## run all tests, in two halves at once (ARGS="-k name" selects, and runs one after the other)
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-here test-hosts
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# Halves of about the same length. What shares a whole site of test hosts stands in one of them.
HOST_TESTS := tests/system/hosts $(addprefix tests/system/playbooks/test_,site.py site_firewall.py site_nodes.py slurm.py storage.py)

test-here: dev  ## the half of the tests that needs no cluster of test hosts
	@$(BIN)/python -m pytest $(HOST_TESTS:%=--ignore %)

test-hosts: dev  ## the half on clusters of test hosts, which mostly waits
	@$(BIN)/python -m pytest $(HOST_TESTS)

lint: dev  ## ruff, mypy, import-linter, ansible-lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync lint-playbooks lint-types lint-imports

lint-types: dev
	@$(BIN)/mypy

lint-imports: dev
	@$(BIN)/lint-imports

lint-playbooks: dev
	@PATH="$(abspath $(BIN)):$$PATH" ansible-lint -q --nocolor playbooks

format: dev  ## format the sources
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

golden: install  ## compare the model with the reference numbers
	@$(BIN)/python -m training.golden tests/golden/tiny_a
	@$(BIN)/python -m training.golden tests/golden/tiny_c

infra-demo: dev  ## run the AWS program against a local stand-in: plan, resources, inventory, cost, destroy
	@$(BIN)/python -m tests.infra_engine.demo $(ARGS)

test-images:  ## build what test hosts start and install from, if it is not kept already (tests would do it too)
	@$(PYTHON) -m tests.system.playbooks.images

test-vm: dev  ## what needs a kernel of its own: limits, modules, NFS, reboots, in QEMU (minutes; root)
	@$(BIN)/python -m pytest tests/vm $(ARGS)

wheelhouse: $(BIN)/python  ## wheels for nodes without a way to an index (playbooks/roles/python)
	@$(PIP) wheel --quiet -c $(CONSTRAINTS) -w wheelhouse '.[nodes]'

pins: dev  ## write constraints/common.txt from what is installed here (after all tests have passed)
	@echo "# Tested together on Python 3.11; written by make pins." > constraints/common.txt
	@$(PIP) freeze --exclude-editable | grep -vE '^(torch|pip|setuptools|wheel)[ =@]' \
		| sed -E 's/^([^=]+==[^;]+)$$/\1; python_version >= "3.11"/' >> constraints/common.txt

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python 3.10 or newer is needed; name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: the venv module is missing; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 2; }

$(VENV)/.installed: $(BIN)/python pyproject.toml $(wildcard constraints/*.txt)
	@echo "installing into $(VENV) ($(PLATFORM) build of torch)"
	@$(PIP) install --quiet --no-compile -c $(CONSTRAINTS) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml $(wildcard constraints/*.txt)
	@echo "installing into $(VENV) with the development tools ($(PLATFORM) build of torch)"
	@$(PIP) install --quiet --no-compile -c $(CONSTRAINTS) -e '.[dev,infra]'
	@$(COMPILE)
	@touch $(VENV)/.installed $@

clean:  ## remove .venv and what the tools cached; runs/ and datasets/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
