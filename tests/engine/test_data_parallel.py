# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --data-parallel-size 2` with `auto`: each rank chooses for itself, and answers alike."""

import asyncio
import os
import re

import engines
import pytest
from test_server import NUM_REQUESTS, OPTIONS, assert_equal_plain, serve, stream_completion

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def server():
    cores = engines.own_cores() or sorted(os.sched_getaffinity(0))
    binding = f"{cores[0]}|{cores[-1]}"  # a rank each, on the same core where there is one
    environment = engines.environment(VLLM_CPU_OMP_THREADS_BIND=binding)
    options = (*OPTIONS, "--spec-tokens", "auto", "--data-parallel-size", "2")
    with serve(str(engines.MODEL), *options, environment=environment) as running:
        yield running


def test_every_rank_answers_as_plain_decoding_and_is_counted(server, prompts, plain):
    async def all_at_once(rank: str) -> list[list[int]]:
        header = {"X-data-parallel-rank": rank}
        asked = (stream_completion(server, prompts[i], **header) for i in range(NUM_REQUESTS))
        return await asyncio.gather(*asked)

    for rank, other in (("0", "1"), ("1", "0")):
        before = server.metric_by_engine("vllm:spec_decode_num_draft_tokens_total")
        assert_equal_plain(dict(enumerate(asyncio.run(all_at_once(rank)))), plain)
        after = server.metric_by_engine("vllm:spec_decode_num_draft_tokens_total")
        drafted = {engine: after[engine] - before.get(engine, 0) for engine in after}
        assert drafted[rank] > 0 and not drafted.get(other)
    # Choices of each controller, and counts of its worker.
    for metric in ("achieved_speedup", "lookup_rounds_total", "draft_failures_total"):
        assert server.metric_by_engine(f"vllm:magicdec_{metric}").keys() == {"0", "1"}, metric
    assert all(server.metric_by_engine("vllm:magicdec_lookup_rounds_total").values())
    assert not any(server.metric_by_engine("vllm:magicdec_draft_failures_total").values())
    log = server.log.read_text()
    for rank in "01":
        assert re.search(rf"DP{rank}\b.*will try several choices", log)
