# SPDX-License-Identifier: Apache-2.0
"""Strategies for configurations, which are accepted or refused in seconds, before any weight is read."""

import contextlib
import json
import math
import re
import signal
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from test_config import configure

from vllm_magicdec.config.fields import user_fields
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register

register()

TIME_LIMIT_S = 5.0
MOST_WAIT_S = 600.0  # wall clock; a virtual machine may stall for minutes
LONGEST_SENTENCE = 900  # characters
PRIVATE = ("adaptive", "lengths")
DRAFT = "/folder/of/a/draft"  # placeholder of the draft model's folder


@pytest.fixture(scope="module", autouse=True)
def known_models(model_dir, draft) -> None:
    """Exclude from timing what vLLM does once per model: it inspects the class in another process."""
    configure(model_dir, {"method": METHOD})
    configure(model_dir, {"method": MODEL_METHOD, "model": draft})


@contextlib.contextmanager
def within_the_limit():
    """Limit the CPU time of the thread, because machines may stall, and abort long waits, as for a pipe."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waited too long"))
    signal.setitimer(signal.ITIMER_REAL, MOST_WAIT_S)
    began_s = time.thread_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    took_s = time.thread_time() - began_s
    assert took_s < TIME_LIMIT_S, f"{took_s:.1f} s"


def cases(number: int) -> settings:
    """Return settings for this number; conftest.py sets whether the cases are the same every time."""
    ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=number, database=None, suppress_health_check=ignored)


PATHS = [
    *"/ /dev/null /dev/zero /dev/full /dev/stdin /etc/passwd /proc/self/mem /nowhere ~ . ..".split(),
    *("", "\0", "a\nb", "é\ud800", "x" * 5000, "context", "served", "file:///etc/passwd"),
]
WORDS = [
    *"auto on off page token max avg greedy probabilistic standard synthetic".split(),
    *"streamingllm snapkv verify-topk h2o AUTO None null 1 -1 1e9 0x10".split(),
]
NUMBERS = [
    *(-1, 0, 1, 2, 128, 129, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *(0.5, 1 - 1e-9, 1.5, 5e-324, 1e308, math.nan, math.inf, -math.inf),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    *map(st.sampled_from, (PATHS, WORDS, NUMBERS)),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
tokens = st.integers(1, 5000)
budgets = st.one_of(st.sampled_from(["auto", 0.1, 0.5, 32, 512, 4096]), st.floats(0, 5000), tokens)
# Values of the right type for each field, so that cases reach later checks.
PLAUSIBLE = {
    "num_speculative_tokens": st.sampled_from([1, 4, 16, 128, "auto", "4", 4.0]),
    "max_num_speculative_tokens": st.sampled_from([1, 6, 16, 128, None]),
    "profile": st.sampled_from([*PATHS, None]),
    "draft_kv_policy": st.sampled_from(["streamingllm", "snapkv", "verify-topk"]),
    "draft_kv_budget": budgets,
    "draft_kv_min_budget": tokens,
    "draft_kv_sink": tokens,
    "draft_kv_refresh": tokens,
    "native_attention": st.booleans(),
    "draft_kv_granularity": st.sampled_from(["page", "token", None]),
    "draft_weights": st.sampled_from(["target", "int8", "int4", "fp8_per_tensor"]),
    "draft_lookup": st.sampled_from(["auto", "on", "off"]),
    "draft_lookup_sources": st.one_of(st.lists(st.sampled_from(PATHS), max_size=3), st.sampled_from(PATHS)),
    "snapkv_window": st.integers(1, 1024),
    "snapkv_recent": st.floats(0, 5000),
    "snapkv_kernel": st.integers(1, 1024),
    "snapkv_pooling": st.sampled_from(["max", "avg"]),
    "draft_sample_method": st.sampled_from(["greedy", "probabilistic"]),
    "enable_adaptive_verification": st.booleans(),
    "rejection_sample_method": st.sampled_from(["standard", "synthetic"]),
    "synthetic_acceptance_length": st.floats(),
    "synthetic_acceptance_rates": st.lists(st.floats(), max_size=8),
    "num_speculative_tokens_per_batch_size": st.lists(
        st.tuples(st.integers(-1, 9), st.integers(-1, 2**21), st.integers(-1, 9)), max_size=3
    ),
}


@st.composite
def misspelt(draw) -> str:
    name = draw(st.sampled_from(user_fields()))
    index = draw(st.integers(0, len(name) - 1))
    before, after = name[:index], name[index + 1 :]
    wrong = [f"{before}x{after}", before + after, before + name[index:] * 2]
    return draw(st.sampled_from([*wrong, name.upper(), name.replace("_", "-")]))


plausible_field = st.one_of(*(st.tuples(st.just(name), values) for name, values in PLAUSIBLE.items()))
wild_field = st.tuples(
    st.one_of(
        st.sampled_from([*PLAUSIBLE]),
        misspelt(),
        st.sampled_from([*PRIVATE, "quantization", "revision", "enforce_eager", ""]),
        st.text(max_size=8),
    ),
    junk,
).filter(lambda field: field[0] not in ("method", "model"))
SELECTED = ({"method": METHOD}, {"model": METHOD}, {"method": MODEL_METHOD, "model": DRAFT})
objects = st.tuples(
    st.sampled_from(SELECTED),
    st.lists(plausible_field, max_size=4),
    st.one_of(st.just([]), st.lists(wild_field, min_size=1, max_size=2)),
).map(lambda parts: {**parts[0], **dict(parts[1]), **dict(parts[2])})
# Accepted configurations, to which tests add one field.
GOOD = [
    *SELECTED,
    {"method": METHOD, "num_speculative_tokens": "auto"},
    {"method": METHOD, "draft_kv_budget": 0.5},
    {"method": METHOD, "draft_kv_policy": "snapkv"},
    {"method": METHOD, "draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    {"method": METHOD, "draft_kv_policy": "verify-topk"},
    {"method": METHOD, "draft_lookup": "on"},
    {"method": METHOD, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
    {"method": MODEL_METHOD, "model": DRAFT, "num_speculative_tokens": "auto"},
]
one_more_field = st.tuples(st.sampled_from(GOOD), st.one_of(plausible_field, wild_field)).filter(
    lambda case: case[1][0] not in case[0]
)


def text_of(value) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # integers of thousands of digits
        return "9" * 5000


def is_named(name: str, sentence: str) -> bool:
    """Return whether a sentence blames a field; after its fault it may list others."""
    blamed = re.split(r"did you mean|It takes ", sentence)[0]
    shown = re.escape(str(MagicDecConfigError(name)))
    return re.search(rf"(?<![\w.-]){shown}(?![\w.-])", blamed) is not None


def assert_one_sentence(sentence: str, fields) -> None:
    assert sentence.isprintable() and len(sentence) < LONGEST_SENTENCE, sentence
    as_read = {*fields, *(name.replace("-", "_") for name in fields)}  # by vLLM
    assert any(is_named(name, sentence) for name in as_read), sentence


def accepted_or_refused(model_dir, draft, fields, suspects, **engine) -> None:
    """Configure an engine; an error must name one of the suspects."""
    if fields.get("model") == DRAFT:
        fields = {**fields, "model": draft}
    try:
        with within_the_limit():
            configure(model_dir, fields, **engine)
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), suspects)
