# SPDX-License-Identifier: Apache-2.0
"""Whatever is given as a configuration is accepted, or refused in one sentence that names the field.

That is before any weight is read (the model here has none), within seconds, and never with a trace.
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from test_config import configure, model_dir  # noqa: F401
from test_draft_model_config import write_model
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_magicdec import files
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.config import user_fields
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Header
from vllm_magicdec.plugin import register

register()

TIME_LIMIT_S = 5.0
MOST_WAIT_S = 600.0  # on the clock, on which a virtual machine may stand still for a minute and more
LONGEST_SENTENCE = 900  # characters
PRIVATE = ("adaptive", "adaptive_budget", "budgets", "lengths")
DRAFT = "/folder/of/a/draft"  # until a case is tried


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    """A draft model's folder."""
    return write_model(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


@pytest.fixture(scope="module", autouse=True)
def known_models(model_dir, draft) -> None:  # noqa: F811
    """What vLLM does once per model, of which it inspects the class in another process, is not timed."""
    configure(model_dir, {"method": METHOD})
    configure(model_dir, {"method": MODEL_METHOD, "model": draft})


class WaitedTooLong(BaseException):
    """No `Exception`: the code that is tried might handle it, and hypothesis would try the case again."""


def give_up(*_) -> None:
    raise WaitedTooLong


@contextlib.contextmanager
def within_the_limit():
    """The thread's own time counts, as a machine may stall. Who waits for long, as for a pipe, is ended."""
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, MOST_WAIT_S)
    began_s = time.thread_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.thread_time() - began_s < TIME_LIMIT_S


def test_who_waits_for_good_is_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "MOST_WAIT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(WaitedTooLong), within_the_limit():
        pipe.read_text()


def cases(number: int):
    """Each within the limit; the same ones every time unless others are asked for, see conftest.py."""
    of_all = settings(
        max_examples=number,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

    def apply(test):
        test.hypothesis.inner_test = within_the_limit()(test.hypothesis.inner_test)
        return of_all(test)

    return apply


PATHS = [
    *(
        "/",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/stdin",
        "/etc/passwd",
        "/proc/self/mem",
        "/nowhere",
    ),
    *("~", ".", "..", "", "\0", "a\nb", "é\ud800", "x" * 5000, "context", "served", "file:///etc/passwd"),
]
WORDS = [
    *(
        "auto",
        "on",
        "off",
        "page",
        "token",
        "max",
        "avg",
        "greedy",
        "probabilistic",
        "standard",
        "synthetic",
    ),
    *("streamingllm", "snapkv", "verify-topk", "h2o", "AUTO", "None", "null", "1", "-1", "1e9", "0x10"),
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
# What each field might take, so that cases get beyond its type.
PLAUSIBLE = {
    "num_speculative_tokens": st.sampled_from([1, 4, 16, 128, "auto", "4", 4.0]),
    "max_num_speculative_tokens": st.sampled_from([1, 6, 16, 128, None]),
    "profile": st.sampled_from([*PATHS, None]),
    "draft_kv_policy": st.sampled_from(["streamingllm", "snapkv", "verify-topk"]),
    "draft_kv_budget": st.one_of(
        st.sampled_from(["auto", 0.1, 0.5, 32, 512, 4096]), st.floats(0, 5000), tokens
    ),
    "draft_kv_max_budget": tokens,
    "draft_kv_min_budget": tokens,
    "draft_kv_sink": tokens,
    "draft_kv_refresh": tokens,
    "draft_kv_cache": st.sampled_from(["whole", "ring"]),
    "native_attention": st.booleans(),
    "draft_kv_granularity": st.sampled_from(["page", "token", None]),
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


def test_every_field_is_tried():
    assert {*PLAUSIBLE, "method", "model"} == set(user_fields())


@st.composite
def misspelt(draw) -> str:
    name = draw(st.sampled_from(user_fields()))
    place = draw(st.integers(0, len(name) - 1))
    wrong = [
        f"{name[:place]}x{name[place + 1 :]}",
        name[:place] + name[place + 1 :],
        f"{name[:place]}{name[place:] * 2}",
        name.upper(),
        name.replace("_", "-"),
    ]
    return draw(st.sampled_from(wrong))


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
# Each is accepted, and another field means something beside it.
GOOD = [
    *SELECTED,
    {"method": METHOD, "num_speculative_tokens": "auto"},
    {"method": METHOD, "draft_kv_budget": "auto"},
    {"method": METHOD, "draft_kv_budget": 0.5},
    {"method": METHOD, "draft_kv_policy": "snapkv"},
    {"method": METHOD, "draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    {"method": METHOD, "draft_kv_policy": "verify-topk", "draft_kv_budget": "auto"},
    {"method": METHOD, "draft_lookup": "on"},
    {"method": METHOD, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
    {"method": MODEL_METHOD, "model": DRAFT, "num_speculative_tokens": "auto", "draft_kv_cache": "ring"},
]
one_more_field = st.tuples(st.sampled_from(GOOD), st.one_of(plausible_field, wild_field)).filter(
    lambda case: case[1][0] not in case[0]
)
# Fields that are words of plain English too.
PLAIN_WORDS = ("method", "model", "profile")


def is_named(name: str, sentence: str) -> bool:
    """Whether a sentence says that something is wrong with a field, in the forms that ours have."""
    blamed = re.split(r"did you mean|It takes ", sentence)[0]  # what follows is other fields
    shown = re.escape(str(MagicDecConfigError(name)))
    forms = [f"'{shown}'", rf"(?<![\w.-]){shown}=", rf"(?:^|: ){shown}(?:: | belongs to )"]
    if name in user_fields() and name not in PLAIN_WORDS:
        forms.append(rf"(?<![\w.-]){shown}(?![\w.-])")
    return re.search("|".join(forms), blamed) is not None


def as_read(names) -> set[str]:
    """vLLM takes dashes for underscores in the names of fields."""
    return {*names, *(name.replace("-", "_") for name in names)}


def assert_one_sentence(sentence: str, fields) -> None:
    """It is one line that names one of the fields."""
    assert sentence.isprintable() and len(sentence) < LONGEST_SENTENCE, sentence
    assert any(is_named(name, sentence) for name in as_read(fields)), sentence


def accepted_or_refused(model_dir, draft, fields, suspects, **engine) -> None:  # noqa: F811
    """Whatever is refused is one of the suspects."""
    if fields.get("model") == DRAFT:
        fields = {**fields, "model": draft}
    try:
        configure(model_dir, fields, **engine)
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), suspects)


@pytest.mark.parametrize(
    ("name", "sentence", "named"),
    [
        ("model", "above the model length", False),
        ("method", "use vLLM's 'mtp' method", False),
        ("model", "name one in 'model'", True),
        ("model", "magicdec: model='x' reads", True),
        ("profile", "magicdec-self: profile: /x is not a profile written by", True),
        ("profile", "magicdec-self: draft_kv_sink=1, not a profile", False),
        ("draft_kv_sink", "did you mean 'draft_kv_sink'? It takes draft_kv_sink", False),
        ("draft_kv_budget", "draft_kv_max_budget=5 is below", False),
        ("", "does not know the field 'x'", False),
        ("", "does not know the field ''", True),
    ],
)
def test_a_field_is_named_as_a_word(name, sentence, named):
    assert is_named(name, sentence) == named


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
def test_objects(model_dir, draft, fields):  # noqa: F811
    accepted_or_refused(model_dir, draft, fields, fields.keys() - {"method", "model"})


@pytest.mark.parametrize("fields", GOOD)
def test_what_another_field_is_added_to_is_accepted(model_dir, draft, fields):  # noqa: F811
    accepted_or_refused(model_dir, draft, fields, [])


@cases(600)
@given(one_more_field)
@example(({"method": METHOD, "draft_kv_policy": "snapkv"}, ("snapkv_window", 1024)))
@example(({"method": METHOD, "draft_kv_policy": "snapkv"}, ("draft_kv_sink", 5000)))
@example(({"method": METHOD, "draft_kv_policy": "verify-topk"}, ("num_speculative_tokens", 128)))
@example(({"method": MODEL_METHOD, "model": DRAFT}, ("quantization", "none such")))
@example(({"method": MODEL_METHOD, "model": DRAFT}, ("quantization", "awq")))
def test_a_single_wrong_field_is_the_one_that_is_named(model_dir, draft, case):  # noqa: F811
    fields, (name, value) = case
    accepted_or_refused(model_dir, draft, {**fields, name: value}, [name])


def is_a_name(value) -> bool:
    """Of a model that vLLM would look for on huggingface.co."""
    return isinstance(value, str) and not value.startswith("/")


@cases(150)
@given(st.sampled_from(["method", "model"]), st.sampled_from(SELECTED), junk)
def test_a_wrong_method_or_model(model_dir, draft, name, selected, value):  # noqa: F811
    fields = {**selected, name: value}
    assume(fields.get("method") != MODEL_METHOD or not is_a_name(fields.get("model")))
    if METHOD in fields.values() or MODEL_METHOD in fields.values():  # else it is vLLM's own affair
        accepted_or_refused(model_dir, draft, fields, ["method", "model"])


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("value", [True, None, "on", [1], {}])
def test_what_the_plugin_fills_in_is_not_the_users(model_dir, name, value):  # noqa: F811
    with pytest.raises(MagicDecConfigError, match=f"does not know the field '{name}'"):
        configure(model_dir, {"method": METHOD, name: value})


NONSENSE = {
    "huge": 10**30,
    "negative": -(10**30),
    "thousands of digits": 10**5000,
    "not a number": math.nan,
    "a switch": True,
    "an object": {"a": [1]},
    "bytes": b"x",
    "no text": "\ud800\n",
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, name in itertools.product(NONSENSE, sorted(PLAUSIBLE))
        if name != "num_speculative_tokens_per_batch_size"
        and (kind, name) != ("a switch", "native_attention")
    ],
)
def test_no_field_takes_nonsense(model_dir, name, kind):  # noqa: F811
    value = NONSENSE[kind]
    with pytest.raises(MagicDecConfigError) as raised:
        configure(model_dir, {"method": METHOD, "draft_lookup": "on", name: value})
    assert_one_sentence(str(raised.value), [name])


@pytest.mark.parametrize("given", [METHOD, [METHOD], 5, {"method": METHOD, 5: 6}])
def test_what_is_no_object_of_fields(model_dir, given):  # noqa: F811
    named = "name of a field is text, not 5" if isinstance(given, dict) else "speculative_config="
    with pytest.raises(MagicDecConfigError, match=named) as raised:
        configure(model_dir, given)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *itertools.product(
            ("method", "model"), ("magicdec_self", "MagicDec-Self", "magic-dec-self", "MagicDec")
        ),
        ("model", "magicdec"),
    ],
)
def test_a_misspelt_method(model_dir, name, field):  # noqa: F811
    with pytest.raises(MagicDecConfigError, match=f"did you mean '{METHOD}'"):
        configure(model_dir, {field: name, "num_speculative_tokens": 2})


def test_a_field_given_twice(model_dir):  # noqa: F811
    for engine, fields in (
        ({"spec_tokens": 4}, {"method": METHOD, "num_speculative_tokens": 5}),
        ({"spec_method": METHOD}, {"method": METHOD}),
        ({"spec_model": METHOD}, {"model": "org/model"}),
    ):
        with pytest.raises(MagicDecConfigError, match="is given twice"):
            configure(model_dir, fields, **engine)


as_text = st.one_of(
    st.sampled_from([*WORDS, *PATHS]),
    scalars.map(lambda value: text_of(value)),
    st.text(max_size=10),
).filter(lambda text: "\0" not in text)  # which no command line can have


def typed(option: str, text: str) -> list[str]:
    """Words of a command line.

    Behind an option without a field vLLM's own parser takes `-0.5` for another one with a field, and what
    comes next for its value: so such text is typed as one word.
    """
    if "." not in option and text.startswith("-") and "." in text:
        return [f"{option}={text}"]
    return [option, text]


option = st.one_of(
    st.tuples(st.sampled_from(["--num-speculative-tokens", "--spec-tokens"]), as_text),
    plausible_field.map(lambda field: (f"--speculative-config.{field[0]}", text_of(field[1]))),
    st.tuples(misspelt().map("--speculative-config.{}".format), as_text),
).map(lambda pair: typed(*pair))
commands = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                *([name, METHOD] for name in ("--speculative-model", "--spec-model", "--spec-method")),
                ["--spec-method", MODEL_METHOD, "--speculative-model", DRAFT],
            ]
        ),
        st.lists(option, max_size=3).map(lambda options: [word for words in options for word in words]),
    ).map(lambda parts: parts[0] + parts[1]),
    objects.map(lambda fields: ["--speculative-config", text_of(fields)]),
    # Damaged, but the method is still named.
    st.tuples(objects.map(lambda fields: text_of(fields)), st.integers(0, 200), st.text(max_size=2)).map(
        lambda parts: ["--speculative-config", parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]]
    ),
)


def text_of(value) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # integers of thousands of digits
        return "9" * 5000


@pytest.fixture(scope="module")
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def fields_typed(arguments) -> set[str]:
    """Names of fields, by themselves or in JSON, as vLLM reads them."""
    names = {word.partition(".")[2] for word in arguments if word.startswith("--speculative-config.")}
    for option, value in itertools.pairwise(arguments):
        if option == "--speculative-config":
            with contextlib.suppress(ValueError):
                names |= json.loads(value).keys()
    return as_read(names)


def assert_names_the_option(line: str, arguments) -> None:
    """What argparse says at last."""
    found = re.search(r"error: argument (\S+): (.+)", line)
    names = {re.split("[.=]", word)[0] for word in arguments if word.startswith("--")}
    assert found and names & set(found[1].split("/")), line
    if "--speculative-config" in found[1] and "no JSON" not in line:
        assert any(is_named(name, found[2]) for name in fields_typed(arguments)), line


@cases(500)
@given(commands)
@example(["--speculative-config", f'"{METHOD}"'])
@example(["--speculative-config", f'{{"method": "{METHOD}", "draft_kv_sink": {"9" * 5000}}}'])
@example(["--speculative-config", f'{{"method": "{METHOD}", "": 1}}'])
@example(["--spec-method", MODEL_METHOD, "--speculative-model", DRAFT, "--speculative-config.", "1"])
@example(["--speculative-model", METHOD, "--num-speculative-tokens=-0.5"])
@example(["--speculative-model", METHOD, "--speculative-config.draft_kv_budget", "-0.5"])
def test_command_lines(parser, model_dir, draft, arguments):  # noqa: F811
    """As `vllm serve` reads them."""
    arguments = [word.replace(DRAFT, draft) for word in arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(["--model", model_dir, "--max-model-len", "4096", *arguments])
    except SystemExit as end:
        assert end.code == 2
        last = said.getvalue().splitlines()[-1]
        assert last.isprintable() and "Traceback" not in said.getvalue()
        assert_names_the_option(last, arguments)
        return
    args.skip_tokenizer_init = True
    fields = args.speculative_config or {}
    methods = (args.spec_model, args.spec_method, fields.get("method"), fields.get("model"))
    if not {METHOD, MODEL_METHOD}.intersection(map(str, methods)):
        return  # vLLM's own affair
    suspects = set(fields) | ({"num_speculative_tokens"} if args.spec_tokens is not None else set())
    suspects -= {"method", "model"} - fields_typed(arguments)
    try:
        EngineArgs.from_cli_args(args).create_engine_config()
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), suspects)


def write_profile(path: Path) -> None:
    steps = [Step(1, 100, 0, 0), Step(1, 100, 0, 2, 512), Step(1, 100, 2, 2, 512), Step(4, 9000, 2, 0)]
    StepTimes.of([TimedStep(step, 0.01 * (1 + step.num_reqs)) for step in steps]).save(path, {"model": "m"})


OTHER_FORMATS = [
    b"[" * 100_000,
    b"PK\x03\x04" + b"\0" * 60,
    b"\x93NUMPY\x01\0\xff\xff",
    b"\x80\x04K.",
    b"{}",
]
damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("new"), st.just(0.0), st.binary(max_size=200)),
    st.tuples(st.just("new"), st.just(0.0), st.sampled_from(OTHER_FORMATS)),
)


def do_damage(path: Path, kind: str, place: float, content: bytes) -> None:
    whole = path.read_bytes()
    at = int(place * len(whole))
    new = {"cut": whole[:at], "put": whole[:at] + content + whole[at + len(content) :], "new": content}
    path.write_bytes(new[kind])


@cases(300)
@given(st.one_of(damage, st.tuples(st.just("json"), st.integers(0, 5), junk)))
def test_damaged_profiles(model_dir, tmp_path, what):  # noqa: F811
    path = tmp_path / "profile.json"
    write_profile(path)
    if what[0] == "json":
        profile, (_, place, value) = json.loads(path.read_text()), what
        name = [*Step._fields, "seconds"][place]
        profile["steps"][place % len(profile["steps"])][name] = value
        path.write_text(text_of(profile))
    else:
        do_damage(path, *what)
    try:
        configure(model_dir, {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path)})
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), ["profile"])
        return
    times = StepTimes.load(path)
    for context in (1, 10**6):
        assert times.predict(Step(3, context, 2, 2, 512)) > 0


def write_datastore(path: Path) -> None:
    """What `magicdec index` would write, without its sorter."""
    tokens = np.array([1, 2, 3, 1, 2, 4, 64], dtype=np.uint8)
    places = np.array([0, 3, 1, 4, 2], dtype=np.uint32)
    header = Header(datastore_files.VERSION, "m", 64, "f", 1, len(tokens), len(places))
    path.mkdir()
    np.save(path / "tokens.npy", tokens)
    np.save(path / "suffix_array.npy", places)
    (path / "header.json").write_text(json.dumps(vars(header)))


def test_the_datastore_is_good_before_it_is_damaged(model_dir, tmp_path):  # noqa: F811
    write_datastore(tmp_path / "store")
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(tmp_path / "store")]}
    configure(model_dir, fields)


@cases(400)
@given(
    st.one_of(
        st.tuples(st.sampled_from(["header.json", "tokens.npy", "suffix_array.npy"]), damage),
        st.tuples(st.sampled_from([*Header.__annotations__, "more"]), junk),
    )
)
def test_damaged_datastores(model_dir, tmp_path, what):  # noqa: F811
    path = tmp_path / "store"
    shutil.rmtree(path, ignore_errors=True)
    write_datastore(path)
    place, change = what
    if "." in place:
        do_damage(path / place, *change)
    else:
        header = json.loads((path / "header.json").read_text())
        (path / "header.json").write_text(text_of({**header, place: change}))
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(path)]}
    accepted_or_refused(model_dir, None, fields, ["draft_lookup_sources"])


@pytest.mark.parametrize("name", ["header.json", "tokens.npy", "suffix_array.npy"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device", "link to nothing", "any user's"])
def test_files_that_are_no_files(model_dir, tmp_path, name, kind):  # noqa: F811
    path = tmp_path / "store"
    write_datastore(path)
    file = path / name
    if kind == "any user's":
        file.chmod(0o666)
    else:
        file.unlink()
        make = {
            "pipe": lambda: os.mkfifo(file),
            "folder": file.mkdir,
            "link to a device": lambda: file.symlink_to("/dev/zero"),
            "link to nothing": lambda: file.symlink_to("/nowhere"),
        }
        make[kind]()
    fields = {"method": METHOD, "draft_lookup": "on", "draft_lookup_sources": [str(path)]}
    with within_the_limit(), pytest.raises(MagicDecConfigError) as raised:
        configure(model_dir, fields)
    assert_one_sentence(str(raised.value), ["draft_lookup_sources"])


def test_a_folder_that_any_user_may_write_is_not_trusted(model_dir, tmp_path):  # noqa: F811
    path = tmp_path / "shared"
    path.mkdir()
    write_profile(path / "profile.json")
    fields = {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path / "profile.json")}
    configure(model_dir, fields)
    path.chmod(0o777)
    with pytest.raises(MagicDecConfigError, match=f"any user may replace .*chmod o-w {path}"):
        configure(model_dir, fields)
    path.chmod(0o1777)  # as /tmp is
    configure(model_dir, fields)


def test_a_link_on_the_way_that_any_user_may_replace_is_not_trusted(tmp_path, monkeypatch):
    """A link to a link: the one between them lies in neither's folder."""
    home, between, real = (tmp_path / name for name in ("home", "between", "real"))
    for folder in (home, between, real):
        folder.mkdir()
    (real / "file").write_text("")
    (between / "link").symlink_to(real)
    (home / "named").symlink_to("../between/link")
    monkeypatch.chdir(home)
    for path in (home / "named" / "file", Path("named/file"), Path("../home/named/../real/file")):
        files.refuse_untrusted(path)
        between.chmod(0o777)
        with pytest.raises(ValueError, match=f"any user may replace {between}/link: chmod o-w {between}"):
            files.refuse_untrusted(path)
        between.chmod(0o755)
    real.chmod(0o777)
    with pytest.raises(ValueError, match=f"any user may replace {real}/file"):
        files.refuse_untrusted(Path("named/file"))


def test_a_link_that_any_user_may_replace_is_not_trusted(model_dir, tmp_path):  # noqa: F811
    write_profile(tmp_path / "profile.json")
    shared = tmp_path / "shared"
    shared.mkdir()
    link = shared / "profile.json"
    link.symlink_to(tmp_path / "profile.json")
    fields = {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(link)}
    configure(model_dir, fields)
    shared.chmod(0o777)
    with pytest.raises(MagicDecConfigError, match=f"any user may replace .*chmod o-w {shared}"):
        configure(model_dir, fields)
