# SPDX-License-Identifier: Apache-2.0
"""Serve a model without and with magicdec-self and compare: `make demo`, or `make demo MODEL=...`.

Each server gets the same greedy requests through the official `openai` client: one chat, then a batch of
concurrent completions, all streaming. The prompts are long excerpts of Python's standard library, which is
on every machine; for the model that ships with the plugin they end in a question about a fact at their
start (tiny-llama/recall.py). Each prompt is sent once beforehand, so that the prefix cache holds it and
the clock sees decoding alone.
"""

import argparse
import asyncio
import itertools
import random
import shlex
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI
from rich.console import Console
from rich.table import Table
from serving import Server, default_options, serve

HERE = Path(__file__).resolve().parent
EMBEDDED_MODEL = HERE / "tiny-llama"
NUM_DRAFT_TOKENS = 4
SPECULATION = ("--speculative-model", "magicdec-self", "--num-speculative-tokens", str(NUM_DRAFT_TOKENS))
PREAMBLE_TOKENS = 64  # room for the chat template and the question

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """Why the demo cannot go on, in one sentence."""


@dataclass(frozen=True)
class Prompt:
    """One request; `answer` is the right beginning of its text where there is one."""

    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Stream:
    """One streamed answer."""

    text: str
    num_tokens: int
    sent_s: float
    first_s: float  # arrival of the first token
    last_s: float


@dataclass(frozen=True)
class Measurement:
    """What one server did with the same requests."""

    chat: Stream
    batch: list[Stream]
    acceptance_length: float | None  # tokens per verification

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the whole batch, from its first token to its last; the first of each stream is prefill's."""
        num_decoded = sum(stream.num_tokens - 1 for stream in self.batch)
        return num_decoded / (max(s.last_s for s in self.batch) - min(s.first_s for s in self.batch))

    @property
    def first_token_ms(self) -> float:
        """Mean over the batch, the prompts being in the prefix cache."""
        return 1000 * sum(s.first_s - s.sent_s for s in self.batch) / len(self.batch)


# ---- prompts


def library_lines() -> list[str]:
    """Lines of well-known modules of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("textwrap", "heapq", "shlex", "fractions", "queue", "bisect", "argparse", "tarfile", "typing")
    modules = [(library / f"{name}.py").read_text(encoding="utf-8") for name in names]
    return "".join(modules).splitlines(keepends=True)


def recall_prompts(count: int, num_tokens: int, count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Documents with a fact near the start that is asked for at the end, for the embedded model."""
    sys.path.insert(0, str(EMBEDDED_MODEL))
    from recall import make_episode

    episodes = [
        make_episode(random.Random(seed), count_tokens, library_lines(), num_tokens - 300)
        for seed in range(count)
    ]
    return [Prompt(episode.prompt, episode.answer) for episode in episodes]


def summary_prompts(count: int, num_tokens: int, count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Excerpts that end in a request for a summary, for any model."""
    lines = library_lines()
    lengths = [count_tokens(line) for line in lines]
    prompts = []
    for index in range(count):
        start = index * len(lines) // count
        taken = 0
        excerpt = []
        for position in itertools.count(start):
            taken += lengths[position % len(lines)]
            if taken > num_tokens:
                break
            excerpt.append(lines[position % len(lines)])
        prompts.append(
            Prompt("".join(excerpt) + "\n\nSummary of the Python code above, in plain English:\n")
        )
    return prompts


def make_prompts(model: str, tokenizer: Any, count: int, context: int, max_tokens: int) -> list[Prompt]:
    """Prompts that leave room for `max_tokens` in `context` tokens.

    Raises:
        DemoError: there is no such room.
    """

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    num_tokens = context - max_tokens - PREAMBLE_TOKENS
    if num_tokens < 512:
        raise DemoError(f"--context {context} is too short for --max-tokens {max_tokens}; raise it")
    make = recall_prompts if is_embedded(model) else summary_prompts
    return make(count, num_tokens, count_tokens)


def is_embedded(model: str) -> bool:
    return Path(model).resolve() == EMBEDDED_MODEL


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer; fetching it shows early whether the model can be reached.

    Raises:
        DemoError: the model is not there, is gated, or the network is missing.
    """
    if (path := Path(model)).is_dir() and not (path / "config.json").exists():
        raise DemoError(f"{model} holds no model: config.json is missing")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:
        raise DemoError(why_not_loaded(model, str(error))) from error


def why_not_loaded(model: str, message: str) -> str:
    """One sentence for the ways in which fetching a model fails."""
    if "gated" in message or "awaiting a review" in message:
        return (
            f"{model} is gated: accept its licence on https://huggingface.co/{model} and set HF_TOKEN "
            "to a token of your account"
        )
    if any(sign in message for sign in ("not a valid model identifier", "Repo id must", "404")):
        return f"there is no model {model}, neither a folder here nor a public model on huggingface.co"
    if any(sign in message for sign in ("connect", "resolve", "Max retries", "offline", "cached files")):
        return f"{model} cannot be fetched from huggingface.co; check the network or give a local folder"
    return f"{model} has no usable tokenizer: {' '.join(message.split())[:200]}"


# ---- requests


async def stream_completion(client: AsyncOpenAI, model: str, prompt: Prompt, max_tokens: int) -> Stream:
    request = client.completions.create(
        model=model,
        prompt=prompt.text,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    return await collect(request, lambda choice: choice.text)


async def stream_chat(client: AsyncOpenAI, model: str, prompt: Prompt, max_tokens: int) -> Stream:
    request = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    return await collect(request, lambda choice: choice.delta.content or "")


async def collect(request, text_of: Callable) -> Stream:
    """Read a stream to its end; the server's own count says how many tokens it had."""
    sent_s = time.monotonic()
    first_s = last_s = sent_s
    pieces: list[str] = []
    num_tokens = 0
    async for chunk in await request:
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            # A chat's first chunk carries the role and no token.
            if piece := text_of(choice):
                last_s = time.monotonic()
                first_s = first_s if pieces else last_s
                pieces.append(piece)
    return Stream("".join(pieces), num_tokens, sent_s, first_s, last_s)


async def measure(server: Server, model: str, prompts: list[Prompt], max_tokens: int) -> Measurement:
    """Fill the prefix cache, then time a chat and a batch of concurrent completions."""
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)
    chat_prompt, *batch = prompts
    started = time.monotonic()
    await stream_chat(client, model, chat_prompt, 1)
    for prompt in batch:
        await stream_completion(client, model, prompt, 1)
    console.print(f"read {len(prompts)} prompts in {time.monotonic() - started:.1f} s")

    chat = await stream_chat(client, model, chat_prompt, max_tokens)
    before = server.metrics()
    streams = await asyncio.gather(*(stream_completion(client, model, p, max_tokens) for p in batch))
    after = server.metrics()
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    return Measurement(chat, list(streams), 1 + accepted / drafts if drafts else None)


# ---- report


def show_answers(measurement: Measurement, prompts: list[Prompt]) -> None:
    """The first lines of every answer, and whether it is right where that is known."""
    kinds = ["chat", *("completion" for _ in measurement.batch)]
    for kind, prompt, stream in zip(kinds, prompts, [measurement.chat, *measurement.batch], strict=True):
        beginning = " / ".join(line.strip() for line in stream.text.strip().splitlines()[:2])
        verdict = ""
        if prompt.answer is not None:
            right = stream.text.strip().startswith(prompt.answer)
            verdict = f" (asked for {prompt.answer}: {'right' if right else 'wrong'})"
        console.print(f"  {kind}: {beginning[:100]!r}{verdict}", markup=False)


def show_comparison(plain: Measurement, magicdec: Measurement) -> None:
    table = Table(title=f"{len(plain.batch)} concurrent streams, greedy, prompts in the prefix cache")
    for column in ("server", "decode tokens/s", "time to first token", "acceptance length"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, result in (("plain", plain), ("magicdec-self", magicdec)):
        length = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
        speed = f"{result.decode_tokens_per_s:.1f}"
        table.add_row(name, speed, f"{result.first_token_ms:.0f} ms", length)
    console.print(table)

    pairs = zip([plain.chat, *plain.batch], [magicdec.chat, *magicdec.batch], strict=True)
    same = sum(a.text == b.text for a, b in pairs)
    total = 1 + len(plain.batch)
    remark = "" if same == total else "; the others part at a near-tie that rounding decides"
    console.print(f"Greedy texts identical: {same} of {total}{remark}.")

    ratio = magicdec.decode_tokens_per_s / plain.decode_tokens_per_s
    console.print(f"Decoding with magicdec-self ran at [bold]{ratio:.2f} x[/bold] the plain speed.")
    if magicdec.acceptance_length is None:
        raise DemoError("the speculative server verified no draft")
    cost = magicdec.acceptance_length / ratio
    console.print(
        f"A round ({NUM_DRAFT_TOKENS} draft steps and one verification) gave "
        f"{magicdec.acceptance_length:.2f} tokens in the time of {cost:.2f} plain steps: speculation "
        "pays where the tokens outnumber the steps."
    )


def run_server(model: str, options: Sequence[str], prompts: list[Prompt], max_tokens: int) -> Measurement:
    """Start a server, measure it, stop it.

    Raises:
        DemoError: the server did not answer a request; the end of its log has been printed.
    """
    console.print(f"$ vllm serve {shlex.join([model, *options])}", markup=False, style="bold")
    started = time.monotonic()
    with console.status("starting the server") as status:

        def show_progress(seconds: float) -> None:
            status.update(f"starting the server, {seconds:.0f} s")

        with serve(model, *options, show_progress=show_progress) as server:
            console.print(f"healthy after {time.monotonic() - started:.0f} s")
            try:
                result = asyncio.run(measure(server, model, prompts, max_tokens))
            except APIError as error:
                console.print(server.log_tail(), markup=False)
                raise DemoError(f"the server did not answer a request: {error}") from error
            status.update("stopping the server")
    return result


def run(arguments: argparse.Namespace, server_options: list[str]) -> None:
    model, context, streams = arguments.model, arguments.context, arguments.streams
    tokenizer = load_tokenizer(model)
    prompts = make_prompts(model, tokenizer, 1 + streams, context, arguments.max_tokens)
    options = ["--max-model-len", str(context), "--max-num-seqs", str(streams), *default_options()]
    if is_embedded(model):
        # Texts are compared letter by letter: in float32 rounding decides fewer near-ties.
        options += ["--dtype", "float32"]
    if not tokenizer.chat_template:
        # A base model has no chat format; its chat is then the bare text.
        options += ["--chat-template", "{{ messages[0]['content'] }}"]
    options += server_options

    results = []
    for name, speculation in (("plain", ()), ("magicdec-self", SPECULATION)):
        console.rule(name)
        results.append(run_server(model, [*options, *speculation], prompts, arguments.max_tokens))
        show_answers(results[-1], prompts)
    console.rule("comparison")
    show_comparison(*results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Every other option goes to both `vllm serve` commands.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="folder or name on huggingface.co")
    parser.add_argument(
        "--context", type=int, default=8192, help="tokens of prompt and answer (default 8192)"
    )
    parser.add_argument("--streams", type=int, default=8, help="concurrent completions (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer (default 128)")
    # A terminated demo must still end its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(*parser.parse_known_args())
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
