# SPDX-License-Identifier: Apache-2.0
"""Adaptive speculation: the number of drafts under `num_speculative_tokens: auto`.

`controller.py` takes the choice of the highest value over cost: the value is that of `value.py`, or with
lookups of `lookup_value.py`; the cost is that of `step_times.py`; and `explorer.py` plans the steps that
teach both. `scheduler.py` asks the controller, `draft_plan.py` carries the choice to the workers,
`metrics.py` exports it, and `request_limits.py` drops drafts that a request does not want. Only these four
change with vLLM. `profiles.py` checks measured step times against the engine's model and method.
"""
