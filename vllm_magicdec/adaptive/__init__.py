# SPDX-License-Identifier: Apache-2.0
"""How many drafts: the choice behind `num_speculative_tokens: auto`.

`controller.py` chooses for every step, from the times that `step_times.py` has learnt and the acceptance
seen. Where drafts can be looked up it is `lookup_controller.py`, from what `places.py` has seen.
`scheduler.py` is where vLLM asks, `draft_plan.py` takes the choice to the workers, and `metrics.py` shows
it. Change the last three when vLLM changes, the others for another rule.
"""
