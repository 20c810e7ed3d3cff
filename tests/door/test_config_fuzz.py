# SPDX-License-Identifier: Apache-2.0
"""Random configurations are accepted, or refused in one sentence that names the field."""

import itertools
import math

import pytest
from config_cases import (
    DRAFT,
    GOOD,
    PLAUSIBLE,
    PRIVATE,
    SELECTED,
    accepted_or_refused,
    assert_one_sentence,
    cases,
    junk,
    known_models,  # noqa: F401 - a fixture
    objects,
    one_more_field,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st
from test_config import configure

from vllm_magicdec.config.fields import user_fields
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError


def test_every_field_has_plausible_values():
    assert {*PLAUSIBLE, "method", "model"} == set(user_fields())


@cases(1200)
@given(objects)
@example({"method": METHOD, "num_speculative_tokens": "auto", "profile": "/dev/zero"})
@example({"method": METHOD, "num_speculative_tokens": "auto", "profile": "/dev/full"})
@example({"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": ["a\nb"]})
@example({"method": METHOD, "self": 1})
@example({"method": METHOD, "cls": 1})
@example({"method": METHOD, "": 1})
@example({"method": MODEL_METHOD, "model": DRAFT, "": None})
@example({"method": MODEL_METHOD, "model": DRAFT, "quantization": ""})
@example({"method": MODEL_METHOD, "model": DRAFT, "revision": ""})
def test_objects(model_dir, draft, fields):
    accepted_or_refused(model_dir, draft, fields, fields.keys() - {"method", "model"})


@pytest.mark.parametrize("fields", GOOD)
def test_good_configurations_are_accepted(model_dir, draft, fields):
    accepted_or_refused(model_dir, draft, fields, [])


@cases(600)
@given(one_more_field)
@example(({"method": METHOD, "draft_kv_policy": "snapkv"}, ("snapkv_window", 1024)))
@example(({"method": METHOD, "draft_kv_policy": "snapkv"}, ("draft_kv_sink", 5000)))
@example(({"method": METHOD, "draft_kv_policy": "verify-topk"}, ("num_speculative_tokens", 128)))
@example(({"method": MODEL_METHOD, "model": DRAFT}, ("quantization", "none such")))
@example(({"method": MODEL_METHOD, "model": DRAFT}, ("quantization", "awq")))
def test_the_only_wrong_field_is_named(model_dir, draft, case):
    fields, (name, value) = case
    accepted_or_refused(model_dir, draft, {**fields, name: value}, [name])


@cases(150)
@given(st.sampled_from(["method", "model"]), st.sampled_from(SELECTED), junk)
def test_wrong_method_or_model_is_refused(model_dir, draft, name, selected, value):
    fields = {**selected, name: value}
    model = fields.get("model")
    if fields.get("method") == MODEL_METHOD:  # vLLM would look for other names on huggingface.co
        assume(not isinstance(model, str) or model.startswith("/"))
    if METHOD in fields.values() or MODEL_METHOD in fields.values():  # else another method is selected
        accepted_or_refused(model_dir, draft, fields, ["method", "model"])


@pytest.mark.parametrize("name", PRIVATE)
def test_private_fields_are_refused(model_dir, name):
    for value in (True, None, "on", [1], {}):
        with pytest.raises(MagicDecConfigError, match=f"does not know the field '{name}'"):
            configure(model_dir, {"method": METHOD, name: value})


NONSENSE = {
    "huge": 10**30,
    "negative": -(10**30),
    "thousands of digits": 10**5000,
    "not a number": math.nan,
    "boolean": True,
    "object": {"a": [1]},
    "bytes": b"x",
    "invalid text": "\ud800\n",
}


@pytest.mark.parametrize("name", sorted(PLAUSIBLE.keys() - {"num_speculative_tokens_per_batch_size"}))
def test_nonsense_is_refused(model_dir, name):
    for nonsense, value in NONSENSE.items():
        if (nonsense, name) == ("boolean", "native_attention"):
            continue
        with pytest.raises(MagicDecConfigError) as raised:
            configure(model_dir, {"method": METHOD, "draft_lookup": "on", name: value})
            pytest.fail(f"{name} takes {nonsense}")
        assert_one_sentence(str(raised.value), [name])


@pytest.mark.parametrize("given", [METHOD, [METHOD], 5, {"method": METHOD, 5: 6}])
def test_other_types_than_objects_are_refused(model_dir, given):
    named = "field names are strings, not 5" if isinstance(given, dict) else "speculative_config="
    with pytest.raises(MagicDecConfigError, match=named) as raised:
        configure(model_dir, given)
    assert str(raised.value).isprintable()


def test_misspelt_method_is_refused(model_dir):
    names = ("magicdec_self", "MagicDec-Self", "magic-dec-self", "MagicDec")
    for field, name in [*itertools.product(("method", "model"), names), ("model", "magicdec")]:
        with pytest.raises(MagicDecConfigError, match=f"did you mean '{METHOD}'"):
            configure(model_dir, {field: name, "num_speculative_tokens": 2})


def test_field_given_twice_is_refused(model_dir):
    for engine, fields in (
        ({"spec_tokens": 4}, {"method": METHOD, "num_speculative_tokens": 5}),
        ({"spec_method": METHOD}, {"method": METHOD}),
        ({"spec_model": METHOD}, {"model": "org/model"}),
    ):
        with pytest.raises(MagicDecConfigError, match="is given twice"):
            configure(model_dir, fields, **engine)
