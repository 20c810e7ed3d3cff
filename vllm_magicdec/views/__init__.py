# SPDX-License-Identifier: Apache-2.0
"""KV views: the parts of a request's paged KV cache that a draft step reads, and the slots that it writes.

| file | content |
| --- | --- |
| `base.py` | batch, step and write slots, shared by all views |
| `pages.py`, `layer_pages.py`, `tokens.py` | views of pages, pages by layer, slots by layer and head |
| `selections.py` | budgets, and the entries selected for the latter two |
| `windows.py` | views of layers that do not see the whole context |
| `kernels.py` | the same by Triton kernels |
| `passes.py`, `token_steps.py` | several steps of a round at once |
"""
