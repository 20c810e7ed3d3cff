# SPDX-License-Identifier: Apache-2.0
"""One round of drafts.

`drafter.py` runs the loop and handles its failures, `staged.py` and `wide_passes.py` check lookups,
`layer_groups.py` groups layers by view, `sizing.py` derives views, graph sizes and memory from the engine,
and `held_tokens.py` tracks the contents of a draft model's cache.

The package is independent of vLLM's model runners (see `Runner`) and of the choice of gamma.
"""
