# SPDX-License-Identifier: Apache-2.0
"""Adaptive speculation: the number of drafts under `num_speculative_tokens: auto`.

`controller.py` chooses for every step from acceptance and `step_times.py`; with lookups it is
`lookup_controller.py`, with the statistics of `bucket_stats.py`. `scheduler.py` asks it, `draft_plan.py`
carries the choice to the workers, and `metrics.py` exports it. Only these three change with vLLM.
"""
