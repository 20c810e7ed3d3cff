# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --data-parallel-size 2` with `auto`: each rank chooses for itself, and answers alike."""

import asyncio
import os
import re
import sys

import engines
import openai
import pytest
from greedy import GREEDY

sys.path.insert(0, str(engines.MODEL.parent))
from serving import serve

pytestmark = pytest.mark.extended

NUM_REQUESTS = 10
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(engines.PAGE)),
    *("--max-model-len", str(engines.MODEL_LEN), "--max-num-seqs", "4", "--max-num-batched-tokens", "1024"),
    *("--data-parallel-size", "2", "--speculative-model", "magicdec-self"),
    *("--num-speculative-tokens", "auto", "--speculative-config.draft_kv_budget", "256"),
)


@pytest.fixture(scope="module")
def server():
    cores = engines.own_cores() or sorted(os.sched_getaffinity(0))
    binding = f"{cores[0]}|{cores[-1]}"  # a rank each, on the same core where there is one
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engines.environment(VLLM_CPU_OMP_THREADS_BIND=binding).items():
            patch.setenv(name, value)
        with serve(str(engines.MODEL), *OPTIONS) as running:
            yield running


def answers(server, prompts, rank):
    """Greedy completions of all prompts at once, from one rank."""

    async def ask_all():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"X-data-parallel-rank": str(rank)},
        ) as client:
            asked = [
                client.completions.create(
                    model=str(engines.MODEL),
                    prompt=prompt,
                    temperature=0,
                    max_tokens=GREEDY["max_tokens"],
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                for prompt in prompts
            ]
            return [answer.choices[0].model_extra["token_ids"] for answer in await asyncio.gather(*asked)]

    return asyncio.run(ask_all())


def test_every_rank_answers_as_plain_decoding_and_is_counted(server, prompts, plain):
    chosen = range(NUM_REQUESTS)
    for rank in ("0", "1"):
        before = server.metric_by_engine("vllm:spec_decode_num_draft_tokens_total")
        got = answers(server, [prompts[i] for i in chosen], rank)
        same = sum(
            tokens == plain[i]["completions"][0]["tokens"] for i, tokens in zip(chosen, got, strict=True)
        )
        assert same >= NUM_REQUESTS - 1  # a near-tie may fall the other way; test_greedy.py judges those
        after = server.metric_by_engine("vllm:spec_decode_num_draft_tokens_total")
        drafted = {engine: after[engine] - before.get(engine, 0) for engine in after}
        other = "1" if rank == "0" else "0"
        assert drafted[rank] > 0 and not drafted.get(other)
    # Choices of each controller, and counts of its worker.
    for metric in (
        "num_speculative_tokens",
        "achieved_speedup",
        "lookup_rounds_total",
        "draft_failures_total",
    ):
        assert server.metric_by_engine(f"vllm:magicdec_{metric}").keys() == {"0", "1"}, metric
    assert all(server.metric_by_engine("vllm:magicdec_lookup_rounds_total").values())
    assert not any(server.metric_by_engine("vllm:magicdec_draft_failures_total").values())


def test_both_ranks_log_their_choices(server):
    log = server.log.read_text()
    for rank in "01":
        assert re.search(rf"DP{rank}\b.*will try several choices", log)
