# `make train` and `make test` need Python 3.11-3.13 and git; everything else comes from the package index.
PYTHON ?= python3
VENV ?= .venv
RUN ?= run
LOCK := locks/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
BIN := $(VENV)/bin
KERNELS := $(wildcard jaxrec/kernels/*/cpu/*)

.PHONY: train test test-full fuzz lint smoke compile_only baseline clean

train: $(VENV)/installed
	$(BIN)/python -m jaxrec.train --config=dlrm_movielens --workdir=$(RUN)

# Two workers: more would need more memory than most machines have to spare. A module's tests stay together.
test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

# All combinations instead of a pairwise cover: hours on 2 cores.
test-full: $(VENV)/installed
	JAXREC_FULL=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

# 100,000 malformed tables, schemas and files instead of 1,000: minutes.
fuzz: $(VENV)/installed
	JAXREC_FULL=1 $(BIN)/python -m pytest --numprocesses=2 tests/test_fuzz_tables.py tests/test_fuzz_files.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Train 50 steps, resume, evaluate; with PYTHON=python3.12 VENV=.venv312 it does so on the newest jax.
smoke: $(VENV)/installed
	rm -rf $(RUN)_smoke
	$(BIN)/python -m jaxrec.train --config=dlrm_movielens --workdir=$(RUN)_smoke --steps=50
	$(BIN)/python -m jaxrec.train --config=dlrm_movielens --workdir=$(RUN)_smoke --steps=80 --resume=must
	$(BIN)/python -m jaxrec.evaluate --workdir=$(RUN)_smoke

# Compilers for devices that are not here; the versions belong to jax 0.12, which needs PYTHON=python3.12 or newer.
compile_only: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r experiments/compile_only/compilers.txt
	$(BIN)/python -m experiments.compile_only.run --mode=all

# PyTorch, torchrec and FBGEMM (CPU builds), for the stacks that jaxrec is compared with; Python 3.11.
baseline: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r experiments/baselines/pytorch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r experiments/baselines/fbgemm.txt

# Without isolation, so that the kernels are compiled against the jaxlib of the lock.
$(VENV)/installed: pyproject.toml setup.py $(LOCK) $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) $(RUN) $(RUN)_*
