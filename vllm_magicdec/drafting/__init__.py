# SPDX-License-Identifier: Apache-2.0
"""One round of drafts.

`drafter.py` has the round and handles its failures, `loops.py` the loop of its passes, `staged.py` and
`wide_passes.py` those that check lookups. `ports.py` says what a round needs of a model runner and of a KV
cache, `model_cache.py` is the cache of a draft model. `layer_groups.py` groups layers by view, and
`sizing.py` derives views, graph sizes and memory from the engine.

The package is independent of vLLM's model runners and of the choice of gamma.
"""
