# Each target sets up .venv by itself, once; it is set up again when pyproject.toml or constraints.txt change.
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

.DEFAULT_GOAL := help
.PHONY: help run test floors check

help: ## show this list
	@sed -n 's/^\([a-z]*\): .*## /make \1 \t/p' $(MAKEFILE_LIST)

run: $(STAMP) ## generate for the bundled prompts with a tiny model
	$(BIN)/python -m jobs.generate $(ARGS)

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

floors: ## the tests with the oldest versions that pyproject.toml names, in .venv-floors
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c floors.txt -e '.[dev,sentencepiece,gguf,bench,slurm]'
	.venv-floors/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

check: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c constraints.txt -e '.[dev,sentencepiece,gguf,bench,slurm]' 'pyright[nodejs]'
	-@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing)/' .venv/lib # pip has one process for that
	@touch $@
