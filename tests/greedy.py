# SPDX-License-Identifier: Apache-2.0
"""Token-by-token comparison with plain decoding, which allows differences by rounding only."""

from typing import Any

# Sampling parameters of compared requests.
GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "logprobs": 2}
# Logprobs closer than this may swap if sums are computed in another order (float32).
ROUNDING = 1e-4
MAX_ROUNDING_SHARE = 0.01


def assert_same_tokens(plain: list[dict[str, Any]], speculative: list[dict[str, Any]], what: str) -> None:
    """Assert that every request's tokens equal plain decoding's (with `logprobs=2`) up to rounding."""
    assert len(plain) == len(speculative)
    rounded = []
    for index, (expected, got) in enumerate(zip(plain, speculative, strict=True)):
        expected, got = expected["completions"][0], got["completions"][0]
        if expected["tokens"] == got["tokens"]:
            assert expected["finish_reason"] == got["finish_reason"]
            continue
        length = min(len(expected["tokens"]), len(got["tokens"]))
        first = next((i for i in range(length) if expected["tokens"][i] != got["tokens"][i]), length)
        assert first < len(expected["logprobs"]), f"{what}: request {index} differs only in its length"
        best, second = sorted(expected["logprobs"][first].values(), reverse=True)[:2]
        assert best - second < ROUNDING, (
            f"{what}: request {index} differs at token {first}, where plain decoding's best two logprobs "
            f"are {best:.6f} and {second:.6f}"
        )
        rounded.append(index)
    if rounded:
        print(f"{what}: {len(rounded)} of {len(plain)} requests differ by rounding: {rounded}")
    assert len(rounded) <= MAX_ROUNDING_SHARE * len(plain), f"{what}: rounding in requests {rounded}"


def first_tokens(request: dict[str, Any], count: int) -> dict[str, Any]:
    """Shorten a request's result to its first `count` tokens."""
    completion = request["completions"][0]
    shortened = {
        **completion,
        "tokens": completion["tokens"][:count],
        "logprobs": completion["logprobs"][:count],
    }
    return {**request, "completions": [shortened]}
