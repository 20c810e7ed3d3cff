# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules share; engines are expensive, so plain decoding is done once."""

import engines
import pytest
import texts
import torch

GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "logprobs": 2}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        # Tests that share a module's engine run in one pytest-xdist worker, so that it starts once.
        shared = item._fixtureinfo.name2fixturedefs.values()
        if any(definitions[-1].scope == "module" for definitions in shared):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(scope="session")
def mixed_prompts() -> list[list[int]]:
    """64 prompts of 20 to 7,000 tokens."""
    return texts.prompts(64, 20, 7000)


@pytest.fixture(scope="session")
def plain_run(mixed_prompts: list[list[int]]) -> engines.EngineRun:
    """Plain greedy decoding of `mixed_prompts`: the truth."""
    return engines.generate(mixed_prompts, GREEDY, max_num_seqs=16)


@pytest.fixture(scope="session")
def plain(plain_run: engines.EngineRun) -> list[dict]:
    return plain_run.results[0][0]


def first_tokens(request: dict, count: int) -> dict:
    """A request's result as if it had ended after `count` tokens."""
    completion = request["completions"][0]
    shortened = {
        **completion,
        "tokens": completion["tokens"][:count],
        "logprobs": completion["logprobs"][:count],
    }
    return {**request, "completions": [shortened]}
