# SPDX-License-Identifier: Apache-2.0
"""How many drafts, and with which KV budget: what `auto` stands for.

`controller.py` chooses for every step, from the times that `step_times.py` has learnt and the acceptance
seen; `request_lengths.py` cuts what each request verifies of it. `scheduler.py` is where vLLM asks,
`draft_plan.py` takes the choice to the workers, and `metrics.py` shows it. Change the first three for
another rule, the others when vLLM changes.
"""
