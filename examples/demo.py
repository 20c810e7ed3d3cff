# SPDX-License-Identifier: Apache-2.0
"""Serve a model without and with speculation and compare: `make demo`, or `make demo MODEL=...`.

The default is SmolLM2-135M-Instruct (`make models`), with questions about the Constitution of the United
States (`constitution.txt`); where it was not made, the embedded model.

The model drafts for itself (magicdec-self), or a draft model does: `make demo ARGS="--draft FOLDER"`.

Each server gets the same greedy streaming requests through the official `openai` client: one chat, then a
batch of completions. Prompts for other models are long excerpts of Python's standard library; for the
embedded model they end in a question about a fact at their start (tiny-llama/recall.py). Each prompt is
sent once beforehand, so that it is in the prefix cache and only decoding is timed. On a CPU the two servers
of these small models run together and take several turns, of which the median counts; another model's
servers run one after the other and decode the batch once.
"""

import argparse
import asyncio
import itertools
import os
import random
import shlex
import signal
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from openai import APIError, AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from serving import HEALTH_INTERVAL_S, Server, default_options, launch, runs_on_cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import real_models

HERE = Path(__file__).resolve().parent
EMBEDDED_MODEL = HERE / "tiny-llama"
REAL_MODEL = "smollm2"  # of `make models`
DOCUMENT = HERE / "constitution.txt"
QUESTIONS = (
    "What powers does the President have? Answer in a few sentences.",
    "How is a law made? Describe every step.",
    "Who elects the Senators, and for how long do they serve?",
    "Which rights does an accused person have?",
    "Quote what the text says about the freedom of speech, and explain it.",
    "What may the States not do?",
    "How can the Constitution be changed?",
    "What does the text say about the courts?",
    "Summarise the document as a list of its most important points.",
)
NUM_DRAFT_TOKENS = 4
SELF = "magicdec-self"
PREAMBLE_TOKENS = 64  # room for the chat template and the question
CONTEXT_TOKENS = 8192
EMBEDDED_CONTEXT_TOKENS = 6144  # the time of prefill grows with the square
MAX_TOKENS, REAL_MAX_TOKENS = 128, 64  # per answer
NUM_TURNS = 3  # of servers that run at the same time
IDLE_SPIN_S = 1.5  # vLLM's idle workers poll for a second before they yield their core
MEMORY_FOR_TWO_BYTES = 12 * 2**30
LINE_INTERVAL_S = 8  # of plain lines instead of bars

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """A reason for ending the demo, in one sentence."""


@dataclass(frozen=True)
class Prompt:
    """One request; `answer` is the expected beginning of its text, if known."""

    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Stream:
    """One streamed answer."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    sent_s: float
    first_s: float  # arrival of the first token
    last_s: float


@dataclass(frozen=True)
class Turn:
    """One decoding of the batch by one server."""

    streams: list[Stream]
    num_drafts: float  # verified drafts, each of up to NUM_DRAFT_TOKENS tokens
    num_accepted: float  # accepted tokens

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed of the batch, without the first token of each stream, which comes from prefill."""
        num_decoded = sum(stream.num_tokens - 1 for stream in self.streams)
        return num_decoded / (max(s.last_s for s in self.streams) - min(s.first_s for s in self.streams))

    @property
    def first_token_ms(self) -> float:
        """Mean time to the first token, with the prompts in the prefix cache."""
        return 1000 * sum(s.first_s - s.sent_s for s in self.streams) / len(self.streams)


@dataclass(frozen=True)
class Measurement:
    """Results of one server."""

    chat: Stream
    turns: list[Turn]

    @property
    def answers(self) -> list[Stream]:
        """The answers to all prompts."""
        return [self.chat, *self.turns[0].streams]

    @property
    def decode_tokens_per_s(self) -> float:
        return statistics.median(turn.decode_tokens_per_s for turn in self.turns)

    @property
    def first_token_ms(self) -> float:
        return statistics.median(turn.first_token_ms for turn in self.turns)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification; None without drafts."""
        num_drafts = sum(turn.num_drafts for turn in self.turns)
        return 1 + sum(turn.num_accepted for turn in self.turns) / num_drafts if num_drafts else None


# ---- progress


class Bars(Progress):
    """Live bars on a terminal, or a plain line with each bar's state every few seconds."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._stopped = threading.Event()

    def start(self) -> None:
        if self.disable:
            threading.Thread(target=self._print_lines, daemon=True).start()
        else:
            super().start()

    def stop(self) -> None:
        self._stopped.set()
        if not self.disable:
            super().stop()

    def _print_lines(self) -> None:
        while not self._stopped.wait(LINE_INTERVAL_S):
            states = [
                f"{task.description}: {task.fields['detail'] or '...'} ({task.elapsed:.0f} s)"
                for task in self.tasks
            ]
            if states:
                console.print(f"  {'; '.join(states)}", markup=False)

    @contextmanager
    def bar(self, description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """Show a bar while the block runs; without `total` it only moves.

        Yields:
            `update(completed=..., advance=..., detail=...)`.
        """
        task = self.add_task(description, total=total, detail="")
        try:
            yield lambda **state: self.update(task, **state)
        finally:
            self.remove_task(task)


# ---- prompts


def library_lines() -> list[str]:
    """Return the lines of well-known modules of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("textwrap", "heapq", "shlex", "fractions", "queue", "bisect", "argparse", "tarfile", "typing")
    modules = [(library / f"{name}.py").read_text(encoding="utf-8") for name in names]
    return "".join(modules).splitlines(keepends=True)


def recall_prompts(count: int, num_tokens: int, count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Return documents that end in a question about a fact near the start, for the embedded model."""
    sys.path.insert(0, str(EMBEDDED_MODEL))
    from recall import make_episode

    episodes = [
        make_episode(random.Random(seed), count_tokens, library_lines(), num_tokens - 300)
        for seed in range(count)
    ]
    return [Prompt(episode.prompt, episode.answer) for episode in episodes]


def summary_prompts(count: int, num_tokens: int, count_tokens: Callable[[str], int]) -> list[Prompt]:
    """Return excerpts that end in a request for a summary, for any model."""
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


def document_prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """Return questions about one document, which all share its pages in the prefix cache.

    The first is a chat's message; the others are written as the model's chats are.
    """
    document = DOCUMENT.read_text()
    chat, *others = (
        f"{document}\n\n{question}" for question in itertools.islice(itertools.cycle(QUESTIONS), count)
    )
    written = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for content in others
    )
    return [Prompt(chat), *map(Prompt, written)]


def make_prompts(model: str, tokenizer: Any, count: int, context: int, max_tokens: int) -> list[Prompt]:
    """Return prompts that leave room for `max_tokens` in `context` tokens.

    Raises:
        DemoError: `context` is too short.
    """

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    num_tokens = context - max_tokens - PREAMBLE_TOKENS
    if num_tokens < 512:
        raise DemoError(f"--context {context} is too short for --max-tokens {max_tokens}; raise it")
    if is_real(model):
        return document_prompts(tokenizer, count)
    make = recall_prompts if is_embedded(model) else summary_prompts
    return make(count, num_tokens, count_tokens)


def is_embedded(model: str) -> bool:
    return Path(model).resolve() == EMBEDDED_MODEL


def is_real(model: str) -> bool:
    return Path(model).name.startswith(real_models.MODELS[REAL_MODEL].folder)


def folder_of(model: str | None) -> str:
    """Return the folder of a model of `make models`, or the model itself; None: the default."""
    if model is None:
        if made := real_models.made_folder(REAL_MODEL):
            return str(made)
        console.print(f"{REAL_MODEL} was not made (make models); serving the model that ships instead.")
        return str(EMBEDDED_MODEL)
    return str(real_models.folder_of(model)) if model in real_models.MODELS else model


def load_tokenizer(model: str) -> Any:
    """Load the model's tokenizer, which shows early whether the model is available.

    Raises:
        DemoError: the model does not exist or is gated, or the network fails.
    """
    if (path := Path(model)).is_dir() and not (path / "config.json").exists():
        raise DemoError(f"{model} holds no model: config.json is missing")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:
        raise DemoError(explain_failure(model, str(error))) from error


def explain_failure(model: str, message: str) -> str:
    """Explain in one sentence why a model could not be fetched."""
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


async def stream_completion(
    client: AsyncOpenAI,
    model: str,
    prompt: Prompt,
    max_tokens: int,
    show_tokens: Callable[[int], None] = lambda count: None,
) -> Stream:
    request = client.completions.create(
        model=model,
        prompt=prompt.text,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return await collect(request, lambda choice: choice.text, show_tokens)


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


async def collect(
    request, text_of: Callable, show_tokens: Callable[[int], None] = lambda count: None
) -> Stream:
    """Read a stream to its end.

    Args:
        request: awaitable of the stream.
        text_of: returns the text of a chunk's choice.
        show_tokens: called with the number of tokens of each chunk that lists them.
    """
    sent_s = time.monotonic()
    first_s = last_s = sent_s
    pieces: list[str] = []
    num_prompt_tokens = num_tokens = 0
    async for chunk in await request:
        if chunk.usage:
            num_prompt_tokens, num_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            show_tokens(len(choice.model_extra.get("token_ids") or ()))
            # A chat's first chunk carries the role and no token.
            if piece := text_of(choice):
                last_s = time.monotonic()
                first_s = first_s if pieces else last_s
                pieces.append(piece)
    return Stream("".join(pieces), num_prompt_tokens, num_tokens, sent_s, first_s, last_s)


@contextmanager
def requests_to(server: Server) -> Iterator[None]:
    """Report failed requests to this server in the block.

    Raises:
        DemoError: the server did not answer a request; the end of its log is printed.
    """
    try:
        yield
    except APIError as error:
        console.print(server.log_tail(), markup=False)
        raise DemoError(f"the server did not answer a request: {error}") from error


async def read_prompts(
    client: AsyncOpenAI, server: Server, name: str, model: str, prompts: Sequence[Prompt], bars: Bars
) -> None:
    """Fill the server's prefix cache."""
    started = time.monotonic()
    num_tokens = 0
    with requests_to(server), bars.bar(f"{name}: reading prompts", total=len(prompts)) as update:
        for done, prompt in enumerate(prompts):
            update(completed=done, detail=f"{done} of {len(prompts)}, {num_tokens:,} tokens")
            send = stream_completion if done else stream_chat
            num_tokens += (await send(client, model, prompt, 1)).num_prompt_tokens
    took_s = time.monotonic() - started
    console.print(f"{name}: read {len(prompts)} prompts, {num_tokens:,} tokens, in {took_s:.1f} s")


async def take_turn(
    client: AsyncOpenAI,
    server: Server,
    model: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    update: Callable[..., None],
) -> Turn:
    """Decode the batch once, and show the progress with a bar's `update`."""
    before = server.metrics()
    total = len(prompts) * max_tokens
    decoded = 0

    def show_tokens(count: int) -> None:
        nonlocal decoded
        decoded += count
        update(completed=decoded, detail=f"{decoded:,} of {total:,} tokens")

    requests = (stream_completion(client, model, prompt, max_tokens, show_tokens) for prompt in prompts)
    streams = await asyncio.gather(*requests)
    after = server.metrics()
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    return Turn(list(streams), drafts, accepted)


async def measure(
    servers: Mapping[str, Server], model: str, prompts: Sequence[Prompt], max_tokens: int, bars: Bars
) -> dict[str, Measurement]:
    """Fill the prefix caches, then time a chat and the batch in turns."""
    chat_prompt, *batch = prompts
    results: dict[str, Measurement] = {}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, server in servers.items():
            client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)
            clients[name] = await stack.enter_async_context(client)
        await asyncio.gather(
            *(read_prompts(clients[name], servers[name], name, model, prompts, bars) for name in servers)
        )
        for name, server in servers.items():
            with requests_to(server), bars.bar(f"{name}: answering a chat"):
                chat = await stream_chat(clients[name], model, chat_prompt, max_tokens)
            results[name] = Measurement(chat, [])
        for turn in range(NUM_TURNS if len(servers) > 1 else 1):
            for name, server in servers.items():
                await asyncio.sleep(IDLE_SPIN_S)
                total = len(batch) * max_tokens
                with requests_to(server), bars.bar(f"{name}: decoding, turn {turn + 1}", total) as update:
                    client = clients[name]
                    results[name].turns.append(
                        await take_turn(client, server, model, batch, max_tokens, update)
                    )
    return results


# ---- report


def show_answers(measurements: Mapping[str, Measurement], prompts: Sequence[Prompt]) -> None:
    """Print the first lines of every answer and whether it is right; equal answers once."""
    for index, prompt in enumerate(prompts):
        texts = {name: result.answers[index].text for name, result in measurements.items()}
        are_equal = len(set(texts.values())) == 1
        for name, text in itertools.islice(texts.items(), 1 if are_equal else None):
            beginning = " / ".join(line.strip() for line in text.strip().splitlines()[:2])
            verdict = ""
            if prompt.answer is not None:
                right = text.strip().startswith(prompt.answer)
                verdict = f" (asked for {prompt.answer}: {'right' if right else 'wrong'})"
            endpoint = "completion" if index else "chat"
            server = "both" if are_equal else name
            console.print(f"  {endpoint}, {server}: {beginning[:48]!r}{verdict}", markup=False)


def show_comparison(measurements: Mapping[str, Measurement]) -> None:
    (_, plain), (method, magicdec) = measurements.items()
    streams = plain.turns[0].streams
    length = round(statistics.mean(stream.num_prompt_tokens for stream in streams))
    table = Table(
        title=f"{len(streams)} concurrent streams, greedy, on cached prompts of {length:,} tokens"
    )
    for column in ("server", "decode tokens/s", "time to first token", "acceptance length"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, result in measurements.items():
        length = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
        speed = f"{result.decode_tokens_per_s:.1f}"
        table.add_row(name, speed, f"{result.first_token_ms:.0f} ms", length)
    console.print(table)
    for name, result in measurements.items():
        if len(result.turns) > 1:
            speeds = ", ".join(f"{turn.decode_tokens_per_s:.0f}" for turn in result.turns)
            console.print(f"{name}: the median of {len(result.turns)} turns, {speeds} tokens/s.")

    pairs = list(zip(plain.answers, magicdec.answers, strict=True))
    same = sum(a.text == b.text for a, b in pairs)
    remark = "" if same == len(pairs) else "; the others diverge at a near-tie that rounding decides"
    console.print(f"Greedy texts identical: {same} of {len(pairs)}{remark}.")

    ratio = magicdec.decode_tokens_per_s / plain.decode_tokens_per_s
    console.print(f"Decoding with {method} ran at [bold]{ratio:.2f} x[/bold] the plain speed.")
    if magicdec.acceptance_length is None:
        raise DemoError("the speculative server verified no draft")
    cost = magicdec.acceptance_length / ratio
    console.print(
        f"A round ({NUM_DRAFT_TOKENS} draft steps and one verification) gave "
        f"{magicdec.acceptance_length:.2f} tokens in the time of {cost:.2f} plain steps: speculation "
        "pays if the tokens outnumber the steps."
    )


# ---- servers


def wait_until_healthy(servers: Mapping[str, Server], bars: Bars) -> None:
    waiting = {name: bars.add_task(f"{name}: starting", total=None, detail="") for name in servers}
    while waiting:
        for name, task in list(waiting.items()):
            server = servers[name]
            if server.is_healthy():
                bars.remove_task(waiting.pop(name))
                console.print(f"{name}: healthy after {time.monotonic() - server.started_s:.0f} s")
            else:
                bars.update(task, detail=server.stage())
        time.sleep(HEALTH_INTERVAL_S)


def run_servers(
    commands: Mapping[str, Sequence[str]], prompts: Sequence[Prompt], max_tokens: int, bars: Bars
) -> dict[str, Measurement]:
    """Start servers at the same time, measure them in turns, and stop them.

    Args:
        commands: model and options of `vllm serve`, by name.
        prompts: the chat's prompt, then the batch's.
        max_tokens: tokens per answer.
        bars: shows the progress.
    """
    with ExitStack() as stack:
        servers = {}
        for core, (name, command) in enumerate(commands.items()):
            console.print(f"$ vllm serve {shlex.join(command)}", markup=False, style="bold")
            # Of two cores vLLM leaves one to the servers' other processes: both would compute on the same.
            own = {"VLLM_CPU_OMP_THREADS_BIND": str(core)} if len(commands) == os.cpu_count() == 2 else {}
            servers[name] = stack.enter_context(launch(*command, environment=own))
        wait_until_healthy(servers, bars)
        model = next(iter(commands.values()))[0]
        return asyncio.run(measure(servers, model, prompts, max_tokens, bars))


def fits_twice(model: str) -> bool:
    """Return whether two servers can run at the same time."""
    return (
        (is_embedded(model) or is_real(model))
        and runs_on_cpu()
        and psutil.virtual_memory().available >= MEMORY_FOR_TWO_BYTES
    )


def speculation_with(draft: str | None, weights: str) -> list[str]:
    """Return the method's name and the options of `vllm serve` for a draft (None: the target)."""
    options = ["--num-speculative-tokens", str(NUM_DRAFT_TOKENS)]
    if weights != "target":
        options += ["--speculative-config.draft_weights", weights]
    if draft is None:
        return [SELF, "--speculative-model", SELF, *options]
    return ["magicdec", "--spec-method", "magicdec", "--speculative-model", draft, *options]


def run(arguments: argparse.Namespace, server_options: list[str], bars: Bars) -> None:
    started = time.monotonic()
    model, streams = arguments.model, arguments.streams
    context = arguments.context or (EMBEDDED_CONTEXT_TOKENS if is_embedded(model) else CONTEXT_TOKENS)
    console.print(
        f"{1 + streams} prompts for {Path(model).name}, each with its answer up to {context:,} tokens.",
        markup=False,
    )
    with bars.bar("making prompts"):
        tokenizer = load_tokenizer(model)
        prompts = make_prompts(model, tokenizer, 1 + streams, context, arguments.max_tokens)
    options = ["--max-model-len", str(context), "--max-num-seqs", str(streams), *default_options()]
    if is_embedded(model) or (is_real(model) and runs_on_cpu()):
        # The demo compares texts, and rounding decides fewer near-ties in float32.
        options += ["--dtype", "float32"]
    if not tokenizer.chat_template:
        # A base model has no chat format and gets the plain text.
        options += ["--chat-template", "{{ messages[0]['content'] }}"]
    options += server_options

    plain = [model, *options]
    # A draft step of this model waits for its weights.
    weights = "int8" if is_real(model) and runs_on_cpu() and arguments.draft is None else "target"
    method, *speculation = speculation_with(arguments.draft, weights)
    commands = {"plain": plain, method: [*plain, *speculation]}
    console.rule("servers")
    if fits_twice(model):
        results = run_servers(commands, prompts, arguments.max_tokens, bars)
    else:
        results = {}
        for name, command in commands.items():
            results |= run_servers({name: command}, prompts, arguments.max_tokens, bars)
    console.rule("answers")
    show_answers(results, prompts)
    console.rule("comparison")
    show_comparison(results)
    console.print(f"The demo took {time.monotonic() - started:.0f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Every other option goes to both `vllm serve` commands.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = "folder, name on huggingface.co, or one of `make models`"
    parser.add_argument("--model", help=f"{names} (default: {REAL_MODEL}, or the embedded model)")
    parser.add_argument("--draft", help="folder of the draft model (default: the model itself)")
    parser.add_argument(
        "--context",
        type=int,
        help=f"tokens of prompt and answer (default {CONTEXT_TOKENS}, "
        f"{EMBEDDED_CONTEXT_TOKENS} for the embedded model)",
    )
    parser.add_argument("--streams", type=int, default=8, help="concurrent completions (default 8)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"tokens per answer (default {MAX_TOKENS}, {REAL_MAX_TOKENS} for {REAL_MODEL})",
    )
    arguments, server_options = parser.parse_known_args()
    if arguments.draft is not None and arguments.model is None:
        arguments.model = str(EMBEDDED_MODEL)  # the drafts that ship are for it
    arguments.model = folder_of(arguments.model)
    if arguments.max_tokens is None:
        arguments.max_tokens = REAL_MAX_TOKENS if is_real(arguments.model) else MAX_TOKENS
    # The demo must end its servers also when it is terminated or its terminal is closed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        with Bars() as bars:
            run(arguments, server_options, bars)
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
