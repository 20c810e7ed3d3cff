# SPDX-License-Identifier: Apache-2.0
"""One round of drafts: `drafter.py` is the loop view -> forward -> sample, and what happens when it fails.
`layer_groups.py` says which layers draft over one view, `sizing.py` what the loop needs of an
engine: the facts that views are made for, CUDA graphs' sizes, memory. `held_tokens.py` and `held_rings.py`
know what a draft model's cache holds.

It knows neither vLLM's model runners (they are given to it as a `Runner`) nor how many drafts are wise.
Change it when a round gets another stage.
"""
