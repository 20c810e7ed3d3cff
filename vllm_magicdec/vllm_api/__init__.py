# SPDX-License-Identifier: Apache-2.0
"""Where the plugin meets vLLM; a new version of vLLM changes this room first.

`hooks.py` lists the attributes that are wrapped and `requirements.py` the names that are relied on beyond
them; `hook.py` checks, wraps and restores them. `unavailable.py` refuses the methods beside a vLLM that
does not fit. `options.py` extends the command line, `engine_config.py`
refuses what only the whole engine shows, `profiles.py` a profile of something else, and `graph_sizes.py`
says what has no CUDA graph. `runner_v1.py` and
`runner_v2.py` put the draft loop into vLLM's model runners, `draft_graphs.py` into CUDA graphs;
`drafts_v1.py` and `drafts_v2.py` run the drafting model, the target or another one; `draft_pages_v1.py`,
`draft_pages_v2.py` and `ring_cache.py` are the latter's KV cache. A SPIRe draft is `spire_model.py`, its
cache `spire_cache.py`, run by `spire_draft_v1.py` and `spire_draft_v2.py`.
`kv_cache.py` groups layers and reserves memory, `attention_groups.py` has metadata builders of views,
`page_metadata_v2.py` the metadata on V2. `adapters.py` is LoRA, `embeddings.py` and `rope.py` are for
multimodal targets. `kv_transfer.py` hides drafts from KV connectors, `verification_attention.py` checks the
target's attention. `cpu_sampling.py`, `cpu_attention.py` and `cpu_llvmlite.py` fix vLLM on CPUs.
"""
