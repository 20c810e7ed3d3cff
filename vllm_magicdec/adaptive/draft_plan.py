# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers about the next drafts."""

# `draft_kv_budget: auto` chooses among the largest budget divided by these.
BUDGET_DIVISORS = (4, 2, 1)


class DraftPlan(int):
    """The number of drafts of a step, with the KV budget to draft them with.

    `SchedulerOutput.num_spec_tokens_to_schedule` is the one thing that both of vLLM's model runners hand
    from the scheduler to the drafter as it is. vLLM computes with it as a number of drafts; so this is one,
    and the budget travels on it.
    """

    budget: int
    """K/V entries that each draft step reads per request, at most."""

    def __new__(cls, drafts: int, budget: int) -> "DraftPlan":
        """So many drafts per request, made with this budget in tokens."""
        plan = super().__new__(cls, drafts)
        plan.budget = budget
        return plan

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        """Pickled on its way to the workers."""
        return int(self), self.budget

    def __repr__(self) -> str:
        return f"DraftPlan({int(self)}, budget={self.budget})"
