# Every verb is a line of ordinary commands: `make -n VERB` shows it.
PYTHON ?= python3
# `make test TORCH=2.14.1` tries another release of torch, in an environment of its own inside .venv.
VENV := .venv$(if $(TORCH),/torch-$(TORCH))
BIN := $(VENV)/bin
PINS := $(BIN)/constraints.txt
# An environment that exists keeps its interpreter: made anew by another one, it would be a mixture of both.
CREATE = { test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV); } && sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(PINS)
INSTALL = $(CREATE) && $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) -e
# Threads that spin while they wait slow down everything else on a shared machine; a hundred processes of the tests
# compile the library anew, half a second each, where Python is told to keep no bytecode.
ENVIRONMENT := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
# `make test DEVICE=cuda` runs the tests there, those marked gpu and cuda_host too; torch must be a CUDA build.
ENVIRONMENT += $(if $(DEVICE),TORCHTUNE_TEST_DEVICE=$(DEVICE))

.PHONY: help quickstart dpo embed grpo agent vision test lint format docs bench cuda gpu configs clean

help:  ## Show the verbs
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(BIN)/.quickstart  ## Fine-tune SmolLM2-135M on a small task, four to ten minutes on two cores
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/run.py

dpo: $(BIN)/.quickstart  ## Train the model of the quickstart on preferences, minutes on two cores
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/dpo.py

embed: $(BIN)/.quickstart  ## Train SmolLM2 to retrieve orders by their sentences, minutes on two cores
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/embed.py

grpo: $(BIN)/.quickstart  ## Let a half-trained model learn from rewards of its own answers, ten minutes
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/grpo.py

agent: $(BIN)/.quickstart  ## Let a small model learn to use a calculator, by rewards
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/agent.py

vision: $(BIN)/.quickstart  ## Let a small model learn to read pictures, minutes on two cores
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart/vision.py

# Many tests wait for processes of their own: three workers keep two cores busy.
test: $(BIN)/.test  ## Lint, import contracts, docs and tests; ALL=1: every row of the long tables; DEVICE=cuda: tests there
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(ENVIRONMENT) $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 $(if $(ALL),--all-rows)

lint: $(BIN)/.test  ## Lint and import contracts
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

format: $(BIN)/.test  ## Format, and mend what the linter can mend
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

docs: $(BIN)/.test  ## Build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

bench: $(BIN)/.bench  ## Compare speed and memory with TRL on this machine
	$(BIN)/python benchmarks/compare_trl.py

cuda: $(BIN)/.test  ## Check which kernels attend on CUDA, without a GPU: make cuda TORCH=2.14.1 where that is a CUDA build
	$(BIN)/python tools/check_cuda.py

# No environment of its own: torch stays as the machine has it. WHEELS: folder of wheels, where there is no network.
gpu:  ## Measure and test on a CUDA GPU, nine minutes a call: make gpu WHEELS=folder AGAIN=1 TOTAL=1700
	$(PYTHON) benchmarks/run_gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(AGAIN),--again) $(if $(TOTAL),--total $(TOTAL))

configs: $(BIN)/.test  ## Write recipes/configs from the templates and the table of models, and what they need
	$(BIN)/python tools/make_configs.py
	$(BIN)/python tools/make_model_table.py
	$(BIN)/python tools/make_dataflow.py
	$(BIN)/python tools/make_pictures.py
	$(BIN)/python tools/make_tables.py
	$(BIN)/python tools/make_agent_docs.py

clean:  ## Remove what the other verbs made
	rm -rf .venv build dist docs/_build quickstart *.egg-info

$(BIN)/.quickstart: pyproject.toml constraints.txt
	$(INSTALL) '.[gguf,vision]' && touch $@

$(BIN)/.test: pyproject.toml constraints.txt
	$(INSTALL) '.[test]' && touch $@

$(BIN)/.bench: pyproject.toml constraints.txt
	$(INSTALL) '.[bench]' && touch $@
