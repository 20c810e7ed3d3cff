# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --speculative-model magicdec-self` over HTTP, through the official client."""

import asyncio
import sys

import engines
import openai
import pytest
from greedy import GREEDY

sys.path.insert(0, str(engines.MODEL.parent))
from serving import Server, serve  # the demo's way to start one

NUM_REQUESTS = 12
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(engines.PAGE)),
    *("--max-model-len", str(engines.MODEL_LEN), "--max-num-seqs", "6", "--max-num-batched-tokens", "1024"),
    *("--speculative-model", "magicdec-self", "--speculative-config.draft_kv_budget", "256"),
)


@pytest.fixture(scope="module")
def server():
    with serve(str(engines.MODEL), *OPTIONS, environment=engines.environment()) as running:
        yield running


async def stream_completion(
    server: Server,
    prompt: list[int],
    stop_after: int | None = None,
    max_tokens: int = GREEDY["max_tokens"],
    **headers: str,
) -> list[int]:
    """Token ids of a streamed greedy completion; hang up after `stop_after` chunks."""
    tokens: list[int] = []
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, default_headers=headers
    ) as client:
        stream = await client.completions.create(
            model=str(engines.MODEL),
            prompt=prompt,
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        chunks = 0
        async for chunk in stream:
            for choice in chunk.choices:
                tokens += choice.model_extra.get("token_ids") or []
            chunks += 1
            if chunks == stop_after:
                await stream.close()
                break
    return tokens


def assert_equal_plain(answers: dict[int, list[int]], plain: list[dict]) -> None:
    """One near-tie may fall the other way; test_greedy.py judges those one by one."""
    same = sum(tokens == plain[i]["completions"][0]["tokens"] for i, tokens in answers.items())
    assert same >= len(answers) - 1


def test_streamed_completions_equal_plain_decoding(server, prompts, plain):
    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(stream_completion(server, prompts[i]) for i in range(NUM_REQUESTS)))

    assert_equal_plain(dict(enumerate(asyncio.run(all_at_once()))), plain)


def test_hang_ups_of_clients_affect_no_other_request(server, prompts, plain):
    async def half_hang_up() -> list[list[int]]:
        stops = [3 if i % 2 else None for i in range(NUM_REQUESTS)]
        return await asyncio.gather(
            *(stream_completion(server, prompts[i], stop_after=stop) for i, stop in enumerate(stops))
        )

    answers = asyncio.run(half_hang_up())
    assert_equal_plain({i: answers[i] for i in range(0, NUM_REQUESTS, 2)}, plain)

    async def until_idle() -> None:
        # Run a step each time: vLLM's gauges are of its last step, which may precede the hang-up.
        while server.metrics()["vllm:num_requests_running"]:
            await stream_completion(server, [5], max_tokens=1)

    asyncio.run(asyncio.wait_for(until_idle(), 600))


def test_chat_answers(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "# note: amber fox=4821\n# recall: amber fox="}]
        options = {"temperature": 0, "max_tokens": 8}
        answer = client.chat.completions.create(model=str(engines.MODEL), messages=messages, **options)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


def test_metrics_show_acceptance_and_failures(server):
    metrics = server.metrics()
    assert metrics["vllm:magicdec_draft_failures_total"] == 0
    assert metrics["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
