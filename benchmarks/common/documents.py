# SPDX-License-Identifier: Apache-2.0
"""Long real text for prompts: the standard library's sources, or a folder of text files."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is this text about? Answer in a few sentences.",
    "Which people and places does the text name, and what does it say about them?",
    "Summarise the most important points of the text as a list.",
    "What does the author want, and which reasons are given?",
    "Write a short letter to a friend about this text.",
    "Quote the sentence of the text that you find most important, and explain it.",
    "How does the text begin, and how does it end?",
    "Which numbers and dates occur in the text?",
)


def describe_documents(folder: Path | None) -> str:
    """Name the documents for a record."""
    return folder.name if folder else "stdlib"


def read_text(folder: Path | None) -> str:
    """Return all documents of a folder, or the standard library's modules without a folder."""
    if folder is not None:
        paths = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    else:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise SystemExit(f"{folder} holds no .txt files")
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return token ids without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


def excerpts(tokenizer: Any, count: int, num_tokens: int, folder: Path | None = None) -> list[list[int]]:
    """Return `count` evenly spread excerpts of `num_tokens` token ids each, which may overlap.

    They begin with the tokens with which the tokenizer begins every text: Gemma needs its `<bos>`.
    """
    text = read_text(folder)
    begin = tokenizer.encode("")
    num_tokens -= len(begin)
    # Tokenize no more text than necessary.
    tokens = encode(tokenizer, text[: 12 * count * num_tokens])
    if len(tokens) < num_tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens; {num_tokens} are needed")
    stride = (len(tokens) - num_tokens) // max(1, count - 1) if count > 1 else 0
    return [begin + tokens[i * stride : i * stride + num_tokens] for i in range(count)]


def questions_about(tokenizer: Any, texts: list[list[int]], num_requests: int) -> list[list[int]]:
    """Return the token ids of requests that ask about the texts in turn, as a chat if the model has any."""
    prompts = []
    for index in range(num_requests):
        text = tokenizer.decode(texts[index % len(texts)], skip_special_tokens=True)
        content = f"{text}\n\n{QUESTIONS[index % len(QUESTIONS)]}"
        if tokenizer.chat_template is None:
            prompts.append(tokenizer.encode(f"{content}\n\nAnswer:"))
        else:
            chat = [{"role": "user", "content": content}]
            prompts.append(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            )
    return prompts


def prompts_of_cells(
    tokenizer: Any, batches: list[int], contexts: list[int], folder: Path | None
) -> Iterator[list[list[int]]]:
    """Yield the prompts' token ids of every cell.

    Short contexts and large batches come first, so that later cells find their prompts in the prefix cache.
    """
    longest = excerpts(tokenizer, max(batches), max(contexts), folder)
    for context in sorted(contexts):
        for batch in sorted(batches, reverse=True):
            yield [prompt[:context] for prompt in longest[:batch]]
