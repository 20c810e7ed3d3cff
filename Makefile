# vllm-magicdec: everything a person or CI types.
PYTHON ?= python3
MODEL ?= examples/tiny-llama
ARGS ?=
OUT ?= benchmarks/runs/gpu
KERNELS ?=
CASES ?=
VLLM ?=
VENV := .venv/bin
# FlashInfer compiles with `ninja`, and vLLM uses it only where that is on the PATH; pip puts it here.
RUN := PATH="$(CURDIR)/$(VENV):$$PATH" $(VENV)/python
# Its theme announces its own end of life at every build. With --quiet it would not be strict.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict
# Two workers that compute with two threads each would wait for one another on two cores.
PYTEST := OMP_NUM_THREADS=1 MAGICDEC_TEST_KERNELS="$(KERNELS)" MAGICDEC_TEST_CASES="$(CASES)" $(RUN) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations 20

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-ray test test-fast test-models lint check-vllm docs docs-models test-gpu soak bench bench-decode results bench-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

venv:  ## set up .venv with the right build of vLLM and the plugin
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "make venv: $(PYTHON) is missing; on Debian and Ubuntu: apt-get install python3 python3-venv"; exit 1; }
	@"$(PYTHON)" .ci/setup_venv.py

demo: venv  ## serve a model with and without speculation and compare (MODEL=..., ARGS="--context 16384 ...")
	@$(RUN) examples/demo.py --model "$(MODEL)" $(ARGS)

demo-ray: venv  ## answers about many documents, from two engines on Ray (ARGS="DOCUMENTS... --out FOLDER")
	@$(RUN) examples/ray_batch.py $(or $(ARGS),docs benchmarks/README.md --out build/ray-answers \
	    --replicas 2 --max-tokens 64)

lint: venv  ## ruff, mypy, which module may import which, and the links of the pages
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache --no-logo
	$(MKDOCS)

check-vllm: venv  ## our calls against another vLLM by mypy (VLLM=wheel or folder of one)
	@$(VENV)/python .ci/check_vllm.py "$(VLLM)"

docs: venv  ## the pages of docs/ as a site, in build/docs
	$(MKDOCS)

docs-models: venv  ## docs/models.md, from what the tests expect of every family of models
	PYTHONPATH=tests $(RUN) tests/models/models_page.py

test: lint  ## lint, then the tests that this machine can run, for about an hour (KERNELS=avx2: as without AVX-512; CASES=all: however long it takes)
	$(PYTEST) $(ARGS)

test-fast: lint  ## lint, then every test that starts no engine
	$(PYTEST) --ignore tests/engine --ignore tests/models/test_matrix.py $(ARGS)

test-models: venv  ## every family of models on both runners with every policy; `make test` runs a few of each
	MAGICDEC_TEST_MODELS=all $(PYTEST) tests/models $(ARGS)

test-gpu: venv  ## the tests that need a CUDA device
	$(RUN) -m pytest -m gpu $(ARGS)

soak: venv  ## a bad day: an hour of traffic, bad input, faults and kills (ARGS="--minutes 4 --out soak.json")
	@$(RUN) benchmarks/soak.py $(ARGS)

bench: venv  ## every speculative method of vLLM against magicdec, as servers (ARGS="--quick": two minutes)
	@"$(PYTHON)" .ci/setup_venv.py --suffix-decoding
	@$(RUN) benchmarks/suite.py $(ARGS)

results: venv  ## the results of every script, on this machine in one go (ARGS="--only ..." for some)
	@"$(PYTHON)" .ci/setup_venv.py --suffix-decoding
	@$(RUN) benchmarks/all_results.py $(ARGS)

bench-decode: venv  ## decode speed alone, plain against magicdec, without a server
	$(RUN) benchmarks/decode.py $(ARGS)

bench-gpu: venv  ## on a GPU: all that it has to show, best first; goes on where it stopped (OUT=folder, ARGS="--hours 1")
	@$(RUN) -m benchmarks.gpu --out "$(OUT)" $(ARGS)

clean:  ## remove what the targets made
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
