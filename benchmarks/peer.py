# SPDX-License-Identifier: Apache-2.0
"""Measure the cells of Vegas, the strongest published sparse self-speculation: `make bench-gpu`.

Vegas (arXiv 2602.07223) serves Qwen3-8B to 128 requests of about 10,000 and 100,000 tokens, with six drafts
per round over 5 to 7 % of the context, at least 256 tokens. Here prompts are excerpts of real text, and the
engines run one after the other with the whole device. The first engine's policy needs the most memory, so
the number of requests that fit its KV cache is the batch of all engines. The clock runs while all requests
decode.

The floor of a plain step is the time to read the weights and the KV cache at the bandwidth that is measured
before the first engine starts.
"""

import argparse
from dataclasses import asdict
from typing import Any

import torch
from common.decoding import decode, medians
from common.documents import describe_documents, excerpts
from common.engines import PAGE, engine, engine_settings, set_environment
from common.machine import vllm_environment
from common.options import add_documents, add_model, add_out, make_parser, settings_of
from common.record import make_record, write
from common.tables import console, make_table
from rich.table import Table

from vllm_magicdec.planner.profile import fill_prefix_cache
from vllm_magicdec.planner.shapes import ModelShape

GAMMA = 6
PLAIN = "plain"
POLICIES = ("verify-topk", "streamingllm", PLAIN)
SOURCE = "arXiv 2602.07223, poster at ICML 2026"
# Tokens/s by context. "streamingllm": Vegas's measurement of MagicDec; "verify-topk": nearest to its own.
VEGAS = {
    10_000: {"gpus": "1 x H100", PLAIN: 940, "streamingllm": 1576, "verify-topk": 1893},
    100_000: {"gpus": "2 x H100", PLAIN: 98, "streamingllm": 208, "verify-topk": 268},
}
# Qwen3 beyond its 32,768 training tokens, according to its model card.
TRAINED_LEN = 32_768
YARN = {
    "max_position_embeddings": 4 * TRAINED_LEN,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000,
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED_LEN,
    },
}


def settings_for(args: argparse.Namespace, context: int) -> dict[str, Any]:
    """Return arguments of `LLM`, on a GPU with vLLM's default page size and CUDA graphs."""
    model_len, on_gpu = context + args.tokens + GAMMA + 1, torch.cuda.is_available()
    return engine_settings(
        args.model,
        args.dtype,
        batch=args.requests,
        model_len=model_len,
        block_size=None if on_gpu else PAGE,
        enforce_eager=not on_gpu,
        hf_overrides=YARN if model_len > TRAINED_LEN else {},
    )


def speculation(policy: str, share: float) -> dict[str, Any] | None:
    """Return the speculative configuration with a budget of `share` of the context."""
    if policy == PLAIN:
        return None
    return {
        "method": "magicdec-self",
        "num_speculative_tokens": GAMMA,
        "draft_kv_policy": policy,
        "draft_kv_budget": share,
    }


def requests_that_fit(llm: Any, num_tokens: int) -> int:
    """Return the number of requests of `num_tokens` that fit the KV cache."""
    cache = llm.llm_engine.vllm_config.cache_config
    usable_pages = cache.num_gpu_blocks - 1  # vLLM reserves one
    return usable_pages // -(-num_tokens // cache.block_size)


def floor_ms(shape: ModelShape, batch: int, context: int, bytes_per_s: float) -> float:
    """Return the time to read a plain step's weights and KV cache."""
    weights = shape.parameters_read(batch) * shape.weight_bytes
    return 1e3 * (weights + batch * context * shape.kv_bytes_per_token) / bytes_per_s


def measure(
    args: argparse.Namespace, context: int, policy: str, batch: int, bytes_per_s: float
) -> dict[str, Any] | None:
    """Measure one engine on at most `batch` requests; return None if the KV cache holds none."""
    settings = settings_for(args, context)
    with engine(settings, speculation(policy, args.budget_share)) as llm:
        batch = min(batch, requests_that_fit(llm, settings["max_model_len"]))
        if batch == 0:
            return None
        prompts = excerpts(llm.get_tokenizer(), batch, context, args.documents)
        fill_prefix_cache(llm, prompts)
        turns = [decode(llm, prompts, args.tokens) for _ in range(1 + args.turns)][1:]
        config = llm.llm_engine.model_config.hf_text_config.to_dict()
    floor = floor_ms(ModelShape.from_config(config), batch, context, bytes_per_s)
    cell = {"context": context, "policy": policy, "batch": batch, "plain_floor_ms": floor}
    return {**cell, **asdict(medians(turns)), "turns": [asdict(turn) for turn in turns]}


def table_of(record: dict[str, Any]) -> Table:
    """Return a table of all cells with the poster's values."""
    columns = ("batch", "tok/s", "speedup", "Vegas", "tokens per round", "step ms", "plain floor ms")
    title = f"{record['settings']['model']}, gamma {GAMMA}; Vegas: {SOURCE}"
    table = make_table(title, columns, ["context", "policy"])
    plain = {row["context"]: row["tokens_per_s"] for row in record["rows"] if row["policy"] == PLAIN}
    for row in record["rows"]:
        context, policy = row["context"], row["policy"]
        own = row["tokens_per_s"] / plain[context] if context in plain else None
        vegas = VEGAS[context][policy] / VEGAS[context][PLAIN] if context in VEGAS else None
        table.add_row(
            *(f"{context:,}", policy, str(row["batch"]), f"{row['tokens_per_s']:.0f}"),
            *("-" if ratio is None else f"{ratio:.2f} x" for ratio in (own, vegas)),
            *(f"{row['acceptance_length']:.2f}", f"{row['step_ms']:.1f}", f"{row['plain_floor_ms']:.1f}"),
        )
    return table


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default="Qwen/Qwen3-8B")
    parser.add_argument("--context", type=int, nargs="+", default=list(VEGAS), help="tokens")
    parser.add_argument("--requests", type=int, default=128, help="at most")
    parser.add_argument("--budget-share", type=float, default=0.06, help="of the context")
    parser.add_argument("--tokens", type=int, default=256, help="generated per request and turn")
    parser.add_argument("--turns", type=int, default=3, help="per engine, after one that warms up")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    set_environment(kv_cache_gib=2)
    record = make_record(
        "peer",
        environment=vllm_environment(),
        settings=settings_of(args),
        documents=describe_documents(args.documents),
        gamma=GAMMA,
        vegas={"source": SOURCE, "tokens_per_s": VEGAS},
        rows=[],
        skipped=[],
    )
    bytes_per_s = 1e9 * record["machine"]["copy_gb_per_s"]
    for context in args.context:
        batch = args.requests
        for policy in POLICIES:
            row = measure(args, context, policy, batch, bytes_per_s)
            if row is None:
                record["skipped"].append(f"{context} tokens: the KV cache holds no request of that length")
                console.print(record["skipped"][-1])
                break
            batch = row["batch"]
            record["rows"].append(row)
            console.print(f"{context:,} tokens, {policy}, batch {batch}: {row['tokens_per_s']:.0f} tok/s")
    console.print(table_of(record))
    write(record, args.out)


if __name__ == "__main__":
    main()
