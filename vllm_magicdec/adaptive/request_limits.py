# SPDX-License-Identifier: Apache-2.0
"""A request's own limit of drafts: `vllm_xargs={"max_num_speculative_tokens": 0}`.

It works with every method: the scheduler drops the drafts beyond the limit before it schedules them, and
the target verifies as many drafts of each request as were scheduled.
"""

from typing import TYPE_CHECKING, Any

from vllm_magicdec.errors import quoted

if TYPE_CHECKING:  # the front end reads this module too
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

LIMIT = "max_num_speculative_tokens"


def limit_of(request: "Request") -> int | None:
    """Return the drafts that a request takes at most; None: any number."""
    given = request.sampling_params and request.sampling_params.extra_args
    limit = given.get(LIMIT) if given else None
    return limit if isinstance(limit, int) else None  # checked, if vLLM's front end has read it


def check_limit(processor: Any, params: Any, *_: Any) -> None:
    """Raise ValueError, which the client gets, for a limit that is no number of drafts."""
    given = getattr(params, "extra_args", None) or {}
    limit = given.get(LIMIT, 0)
    if type(limit) is not int or limit < 0:
        raise ValueError(
            f"vllm_xargs: {LIMIT}={quoted(limit)} is no number of drafts; use 0 for none, or remove it"
        )


def drop_drafts(scheduler: "Scheduler", *_: Any, **__: Any) -> None:
    """Drop the drafts beyond the limits of the running requests."""
    if scheduler.vllm_config.speculative_config is None:
        return
    for request in scheduler.running:
        limit = limit_of(request)
        if limit is not None and len(request.spec_token_ids) > limit:
            request.spec_token_ids = request.spec_token_ids[:limit]
