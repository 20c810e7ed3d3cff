# SPDX-License-Identifier: Apache-2.0
"""KV views: the parts of a request's paged KV cache that a draft step reads, and the slots that it writes.

| file | content |
| --- | --- |
| `round.py` | batch, passes and views of a round |
| `slots.py` | where the drafted tokens go |
| `pages.py`, `layer_pages.py`, `tokens.py` | views of pages, pages by layer, slots by layer and head |
| `selections.py` | budgets, and the entries selected for the latter two |
| `windows.py` | views of layers that do not see the whole context |
| `kernels.py` | the same by Triton kernels |
| `tensors.py` | helpers for tensors of indices |
"""
