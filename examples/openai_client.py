# SPDX-License-Identifier: Apache-2.0
r"""Stream from a server with speculation through the official `openai` client. Start the server first:

    VLLM_CPU_KVCACHE_SPACE=2 .venv/bin/vllm serve examples/tiny-llama --block-size 32 \
        --max-model-len 8192 --speculative-model magicdec-self --num-speculative-tokens 4

(Only the CPU build reads the variable, in GiB.)

Wait for "Application startup complete", then in another terminal:

    .venv/bin/python examples/openai_client.py
"""

import argparse
import heapq
import sys
from pathlib import Path

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none")  # the server needs no key
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {args.base_url}; start the one that --help prints")

    # A long prompt: the first half of a module of the standard library.
    source = Path(heapq.__file__).read_text()
    prompt = source[: len(source) // 2]

    print("--- completion")
    for chunk in client.completions.create(
        model=model, prompt=prompt, max_tokens=96, temperature=0, stream=True
    ):
        print(chunk.choices[0].text, end="", flush=True)

    print("\n--- chat")
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{prompt}\n\nWhat does this module do?"}],
        max_tokens=96,
        temperature=0,
        stream=True,
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
