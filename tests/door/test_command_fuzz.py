# SPDX-License-Identifier: Apache-2.0
"""Random options of `vllm serve` are accepted, or refused in one sentence that names an option."""

import contextlib
import io
import itertools
import json
import re

import pytest
from config_cases import (  # noqa: F401
    DRAFT,
    PATHS,
    WORDS,
    as_read,
    assert_one_sentence,
    cases,
    draft,
    is_named,
    known_models,
    misspelt,
    objects,
    plausible_field,
    scalars,
    text_of,
)
from hypothesis import example, given
from hypothesis import strategies as st
from test_config import model_dir  # noqa: F401
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError

as_text = st.one_of(st.sampled_from([*WORDS, *PATHS]), scalars.map(text_of), st.text(max_size=10)).filter(
    lambda text: "\0" not in text
)  # not possible on a command line


def typed(option: str, text: str) -> list[str]:
    """Return words of a command line.

    vLLM's parser takes a word like `-0.5` for an option with a field, so the option and this text are one
    word.
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
    # One character is replaced; the text may still name the method.
    st.tuples(objects.map(text_of), st.integers(0, 200), st.text(max_size=2)).map(
        lambda parts: ["--speculative-config", parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]]
    ),
)


@pytest.fixture(scope="module")
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def fields_typed(arguments) -> set[str]:
    """Return the names of fields, as options or in JSON, as vLLM reads them."""
    names = {word.partition(".")[2] for word in arguments if word.startswith("--speculative-config.")}
    for option, value in itertools.pairwise(arguments):
        if option == "--speculative-config":
            with contextlib.suppress(ValueError):
                names |= json.loads(value).keys()
    return as_read(names)


def assert_names_the_option(line: str, arguments) -> None:
    """Check the last line of argparse."""
    found = re.search(r"error: argument (\S+): (.+)", line)
    names = {re.split("[.=]", word)[0] for word in arguments if word.startswith("--")}
    assert found and names & set(found[1].split("/")), line
    if "--speculative-config" in found[1] and not re.search("is not (a )?JSON", line):
        assert any(is_named(name, found[2]) for name in fields_typed(arguments)), line


@cases(500)
@given(commands)
@example(["--speculative-config", f'"{METHOD}"'])
@example(["--speculative-config", f'{{"method": "{METHOD}", "draft_kv_sink": {"9" * 5000}}}'])
@example(["--speculative-config", f'{{"method": "{METHOD}", "": 1}}'])
@example(["--spec-method", MODEL_METHOD, "--speculative-model", DRAFT, "--speculative-config.", "1"])
@example(["--speculative-model", METHOD, "--speculative-config.model", "null"])
@example(["--speculative-model", METHOD, "--num-speculative-tokens=-0.5"])
@example(["--speculative-model", METHOD, "--speculative-config.draft_kv_budget", "-0.5"])
def test_command_lines(parser, model_dir, draft, arguments):  # noqa: F811
    """Parse options as `vllm serve` does."""
    arguments = [word.replace(DRAFT, draft) for word in arguments]
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            args = parser.parse_args(["--model", model_dir, "--max-model-len", "4096", *arguments])
    except SystemExit as end:
        assert end.code == 2
        last = stderr.getvalue().splitlines()[-1]
        assert last.isprintable() and "Traceback" not in stderr.getvalue()
        assert_names_the_option(last, arguments)
        return
    args.skip_tokenizer_init = True
    fields = args.speculative_config or {}
    methods = (args.spec_model, args.spec_method, fields.get("method"), fields.get("model"))
    if not {METHOD, MODEL_METHOD}.intersection(map(str, methods)):
        return  # another method
    suspects = set(fields) | ({"num_speculative_tokens"} if args.spec_tokens is not None else set())
    suspects -= {"method", "model"} - fields_typed(arguments)
    try:
        EngineArgs.from_cli_args(args).create_engine_config()
    except MagicDecConfigError as error:
        assert_one_sentence(str(error), suspects)
