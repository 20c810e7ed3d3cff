# SPDX-License-Identifier: Apache-2.0
"""Generate without a server, with drafts by the model itself over a part of its KV cache.

.venv/bin/python examples/offline.py
.venv/bin/python examples/offline.py --model meta-llama/Llama-3.1-8B-Instruct
"""

import argparse
import os
import textwrap
from pathlib import Path

from vllm import LLM, SamplingParams

TINY_LLAMA = Path(__file__).resolve().parent / "tiny-llama"


def acceptance_length(llm: LLM) -> float:
    """Return the tokens per round: the accepted drafts and the one that verification adds."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafts = values["vllm:spec_decode_num_drafts"]
    return 1 + values["vllm:spec_decode_num_accepted_tokens"] / drafts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(TINY_LLAMA), help="folder or name on huggingface.co")
    parser.add_argument("--draft-tokens", type=int, default=4, help="per round (default 4)")
    parser.add_argument("--draft-kv-budget", type=float, default=512, help="KV entries a draft step reads")
    args = parser.parse_args()

    # The CPU build's default size of the KV cache, in GiB, exceeds most machines' free memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    llm = LLM(
        model=args.model,
        max_model_len=8192,
        block_size=32,  # the budget is rounded to whole pages of this many tokens
        enforce_eager=args.model == str(TINY_LLAMA),  # compiling takes longer than the tiny model runs
        disable_log_stats=False,  # get_metrics() reads them
        speculative_config={
            "method": "magicdec-self",
            "num_speculative_tokens": args.draft_tokens,
            "draft_kv_budget": args.draft_kv_budget,
        },
    )
    # Long prompts: parts of a module of the standard library.
    source = Path(textwrap.__file__).read_text()
    prompts = [source[: len(source) * share // 4] for share in (1, 2, 3)]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False):
        completion = output.outputs[0]
        print(f"--- after {len(output.prompt_token_ids)} tokens of prompt:\n{completion.text}")
    print(f"--- acceptance length: {acceptance_length(llm):.2f} of at most {1 + args.draft_tokens}")


if __name__ == "__main__":
    main()
