# The set-up is part of every target: a fresh machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# The pip that comes with Python 3.11 takes twice as long to find what fits together.
WHENCE := $(INSTALL) pip && $(INSTALL) --editable
# Of 22,000 files the tests import a third: each is compiled when it is first imported, and kept for all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long check lint types docs audit versions benchmark peers gpu clean

# Each stamp stands for one set of extras; `dev` holds all that `demo` needs.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(WHENCE) '.[cli]'
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(WHENCE) '.[dev]'
	touch $@ .venv/demo.stamp

## Train PPO, IIF and a random-drop control on FrozenLake for 22 rounds; print a verdict, write out/demo/report.html.
demo: .venv/demo.stamp
	$(BIN)/whence compare --preset lda-code/frozenlake --arms ppo,iif,random --seeds 3 \
		--rounds 22 --n-envs 8 --n-steps 256 --eval-episodes 100 --out out/demo

TEST := OMP_NUM_THREADS=1

## The test suite, warnings as errors; two files at a time, one thread each.
test: .venv/dev.stamp
	$(TEST) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

## The tests that take long: sweeps over nodes that die, models in shards, and further cases of what `make test` has.
test-long: .venv/dev.stamp
	$(TEST) $(BIN)/python -m pytest -m long --numprocesses 2 --dist loadfile

## Static checks, known vulnerabilities of the pins, and the documentation into out/site; two at a time.
check: .venv/dev.stamp
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint types docs audit

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/dev.stamp
	$(BIN)/mypy

docs: .venv/dev.stamp
	$(BIN)/python docs/gallery.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -m site tests/docs/test_docs.py tests/docs/test_gallery.py

## Known vulnerabilities of the pinned versions, by pip-audit; "not run" where it cannot ask, which is no error.
audit: .venv/dev.stamp
	$(BIN)/python tests/run_audit.py

## Tests under the oldest and the newest versions of other libraries, on each Python there is; results/versions.md.
versions: .venv/bin/python
	$(TEST) $(BIN)/python tests/run_versions.py

## The time and memory of scoring policies, compared with a plain forward and backward pass and with SB3's training.
benchmark: .venv/dev.stamp
	$(BIN)/python -m studies.benchmarks.run results/benchmarks --only mlp,minigrid,nature,training
	$(BIN)/python -m studies.benchmarks.tables results/benchmarks

## Install the libraries that the suite compares with; torch stays as it is.
peers: .venv/dev.stamp
	$(WHENCE) '.[peers]'
	$(INSTALL) --no-deps bergson kronfluence

## All that needs a GPU, on a machine with one: the suite, the CUDA tests, the laboratory, and a GRPO run.
gpu: .venv/dev.stamp
	$(BIN)/python -m studies.benchmarks.run --device cuda --list > /dev/null
	$(MAKE) peers
	$(BIN)/python -m studies.benchmarks.run results/benchmarks --device cuda
	$(BIN)/python -m studies.benchmarks.tables results/benchmarks
	$(BIN)/python -m pytest -m cuda
	$(BIN)/whence llm compare --task arithmetic --seeds 3 --out out/arithmetic
	$(BIN)/whence llm train --task arithmetic --algorithm grpo --selection iif --run out/grpo

clean:
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
