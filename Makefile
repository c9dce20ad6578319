# make setup   a virtual environment in .venv with pinned versions
# make train   set-up and the main job
# make quick   tests to run after each change; the last lines say what ran
# make test    set-up and the checks: ruff, mypy, the test suite
# make gate    whether the working tree trains the same bits as COMMIT (default: HEAD) did
# make test-rest  what make test leaves out for its time: several devices, other pairs ...
# make test-cuda  both programs, compiled or traced for absent CUDA devices; 2 GB in .venv-aot
# make test-tpu   the JAX step, compiled for absent TPUs; .venv-tpu
# make test-pages  the pages in a browser, chromium or chrome, if one is installed
# make finetune  fine-tunes a small Llama from end to end (docs/finetune.md): a minute

PYTHON ?= python3
BIN := .venv/bin
PYTEST_FLAGS ?=  # PYTEST_FLAGS=--fresh-cache: with no program that a former run compiled

# Without bytecode the suite's many processes would compile our modules every time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train quick test suite gate test-rest test-cuda test-tpu test-pages finetune check

setup: .venv/.ready

# pip compiles on one core. A package may have a file in it for a later Python, so failure is none.
.venv/.ready .venv-aot/.ready .venv-tpu/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@D)
	$(FIND)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRA)]'
	$(@D)/bin/python -W ignore -m compileall -qq -j 0 $(@D)/lib || true
	touch $@

.venv/.ready: EXTRA := dev
.venv-aot/.ready: EXTRA := aot
.venv-tpu/.ready: EXTRA := tpu-aot

# A compiler's environment has the compiler alone, and finds the packages of .venv.
.venv/.ready: FIND :=
.venv-aot/.ready .venv-tpu/.ready: FIND = cd $(@D)/lib/python3*/site-packages && echo ../../../../.venv/lib/python3*/site-packages >venv.pth
.venv-aot/.ready .venv-tpu/.ready: .venv/.ready

train: setup
	$(BIN)/python -m jax_impl.train --policy bf16

quick: setup
	$(BIN)/python -m pytest parity_tests --quick -n auto $(PYTEST_FLAGS)

test: setup  # mypy is one process: beside it the suite has the other cores
	$(MAKE) --no-print-directory -j 2 check suite

COMMIT ?= HEAD

gate: setup
	$(BIN)/python -m parity_tests.gate $(COMMIT)

suite: setup
	$(BIN)/python -m pytest parity_tests -n auto --durations=10 $(PYTEST_FLAGS)

test-rest: setup
	$(BIN)/python -m pytest parity_tests --rest -n auto --durations=10 $(PYTEST_FLAGS)

test-cuda: .venv-aot/.ready
	.venv-aot/bin/python -m pytest parity_tests/cuda -n auto --durations=10

test-tpu: .venv-tpu/.ready
	.venv-tpu/bin/python -m pytest parity_tests/tpu -n auto --durations=10

test-pages: setup
	$(BIN)/python -m pytest parity_tests/check/test_page_in_a_browser.py parity_tests/monitor/test_report.py

finetune: setup
	$(BIN)/python examples/finetune/finetune.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
