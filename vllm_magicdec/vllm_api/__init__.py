# SPDX-License-Identifier: Apache-2.0
"""Where the plugin meets vLLM; a new version of vLLM changes this room first.

`hooks.py` lists the attributes that are wrapped and `requirements.py` the names that are relied on beyond
them; `hook.py` checks, wraps and restores them. `unavailable.py` refuses the methods beside a vLLM that
does not fit. `options.py` extends the command line, `engine_config.py`
refuses what only the whole engine shows, `profiles.py` a profile of something else, and `graph_sizes.py`
says what has no CUDA graph. `runner_v1.py` and
`runner_v2.py` put the draft loop into vLLM's model runners, `draft_graphs.py` into CUDA graphs;
`drafts_v1.py` and `drafts_v2.py` know who drafts, the target or another model; a trained one is
`spire_model.py`, its cache `spire_cache.py`, and `spire_draft_v1.py` and `spire_draft_v2.py` bring both to
a runner. `draft_pages_v1.py` and `draft_pages_v2.py` say where another model's KV cache is, and
`ring_cache.py` makes it small.
`kv_cache.py` reads how vLLM laid out the cache and leaves memory beside it, `attention_groups.py` has
vLLM's metadata builders for a view and `page_metadata_v2.py` what they build on V2, `adapters.py` is LoRA,
`embeddings.py` and `rope.py` are for multimodal targets.
`kv_transfer.py` keeps drafts from KV connectors, `verification_attention.py` says where verifying is wrong
or slow. `cpu_sampling.py` mends vLLM's rejection sampler on a CPU, and `cpu_attention.py` its attention.
"""
