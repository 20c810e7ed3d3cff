# SPDX-License-Identifier: Apache-2.0
"""KV views: where a draft step looks in a request's paged KV cache, and where it writes.

`base.py` holds what all views share: the batch, the step, the slots written to. `pages.py` makes views of
whole pages, `layer_pages.py` of every layer's own, `tokens.py` of slots per layer and KV head;
`selections.py` keeps what was chosen for the last two.
`windows.py` makes those of layers that do not see the whole context, for which nobody chooses. `kernels.py`
is the same by one kernel each, for a GPU. `passes.py` takes several of a round's steps at once,
`token_steps.py` over views of tokens. `rings.py` says where pages are in a cache that has no more than
sinks and a window. Change one when the draft is to see something else than now, not for another way to
choose it.
"""
