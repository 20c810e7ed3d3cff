# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's interfaces; a new version of vLLM changes this subpackage first.

`hooks.py` lists the attributes to wrap and `requirements.py` the other names that the plugin needs;
`vllm_magicdec.hooking` checks, wraps and restores them. `unavailable.py` refuses the methods if the
installed vLLM is not supported. `options.py` extends the command line, `engine_config.py` checks the fields
against the engine configuration, and `graph_sizes.py` reports missing CUDA graphs.
`runner_v1.py` and `runner_v2.py` put the draft loop into vLLM's model runners, `draft_graphs.py` into CUDA
graphs. `draft_runner.py` is what both have in common. `draft_models_v1.py` and `draft_models_v2.py` run
draft models in place of the target.
`runner_wrappers.py` wraps methods of single runners. `spire_model.py` is a SPIRe draft and `spire_cache.py`
its cache. `kv_cache.py` groups layers and reserves memory, `attention_groups.py` has metadata builders of
views, `page_metadata_v2.py` the metadata on V2. `adapters.py` supports LoRA, `embeddings.py` and `rope.py`
multimodal targets. `kv_transfer.py` hides drafts from KV connectors, `verification_attention.py` checks the
target's attention. `cpu_sampling.py` and `cpu_llvmlite.py` fix vLLM on CPUs.
"""
