# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --speculative-model magicdec-self` over HTTP, through the official client."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

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
    *("--speculative-model", "magicdec-self", "--num-speculative-tokens", "5"),
    *("--speculative-config.draft_kv_budget", "256"),
)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engines.environment().items():
            patch.setenv(name, value)
        with serve(str(engines.MODEL), *OPTIONS) as running:
            yield running


@pytest.fixture(scope="module")
def chosen(prompts):
    """Indices of prompts."""
    return list(range(NUM_REQUESTS))


async def stream_completion(
    server: Server, prompt: list[int], stop_after: int | None = None, max_tokens: int = GREEDY["max_tokens"]
) -> list[int]:
    """Token ids of a streamed greedy completion; hang up after `stop_after` chunks."""
    tokens: list[int] = []
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
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


def agree(tokens: list[int], request: dict) -> bool:
    return tokens == request["completions"][0]["tokens"]


def test_streamed_completions_equal_plain_decoding(server, prompts, plain, chosen):
    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(stream_completion(server, prompts[i]) for i in chosen))

    answers = asyncio.run(all_at_once())
    # One near-tie may fall the other way over HTTP as well; test_greedy.py judges those one by one.
    assert (
        sum(agree(tokens, plain[i]) for i, tokens in zip(chosen, answers, strict=True)) >= len(chosen) - 1
    )


def test_hang_ups_of_clients_affect_no_other_request(server, prompts, plain, chosen):
    async def half_hang_up() -> list[list[int]]:
        return await asyncio.gather(
            *(
                stream_completion(server, prompts[i], stop_after=3 if n % 2 else None)
                for n, i in enumerate(chosen)
            )
        )

    answers = asyncio.run(half_hang_up())
    stayed = list(zip(chosen, answers, strict=True))[::2]
    assert sum(agree(tokens, plain[i]) for i, tokens in stayed) >= len(stayed) - 1

    async def until_idle() -> None:
        # Run a step each time: vLLM's gauges are of its last step, which may precede the hang-up.
        while server.metrics()["vllm:num_requests_running"]:
            await stream_completion(server, [5], max_tokens=1)

    asyncio.run(asyncio.wait_for(until_idle(), 600))


def test_chat_answers(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "# note: amber fox=4821\n# recall: amber fox="}]
        answer = client.chat.completions.create(
            model=str(engines.MODEL), messages=messages, temperature=0, max_tokens=8
        )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def test_metrics_show_acceptance_and_failures(server):
    metrics = server.metrics()
    assert metrics["vllm:magicdec_draft_failures_total"] == 0
    assert metrics["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.extended
def test_vllms_own_benchmark_reports_acceptance(server, tmp_path):
    vllm = Path(sys.executable).with_name("vllm")
    command = [
        *(str(vllm), "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--model", str(engines.MODEL), "--dataset-name", "random", "--random-input-len", "300"),
        *("--random-output-len", "32", "--num-prompts", "6", "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json"),
    ]
    limit_s = engines.TIME_LIMIT_S
    subprocess.run(command, check=True, env=engines.environment(), capture_output=True, timeout=limit_s)
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["completed"] == 6
    assert result["spec_decode_acceptance_length"] >= 1
