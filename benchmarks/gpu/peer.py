# SPDX-License-Identifier: Apache-2.0
"""The cells of the strongest peer that has published figures, so that ours can stand beside them.

Run as `make bench-gpu`, or `python -m benchmarks.gpu.peer` from the root of the project. Vegas (arXiv
2602.07223) serves Qwen3-8B to 128 requests with about 10,000 and 100,000 tokens of context, six drafts a
round, over 5 to 7 % of the context. With random weights drafts are accepted at the rate that it reports,
whatever they are, so that only time is compared; with `--model` the acceptance is the model's own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.common.options import add_out, make_parser, settings_of
from benchmarks.common.policies import POLICIES
from benchmarks.common.record import make_record, write
from benchmarks.gpu.engine import Result, random_model, run_cells, wrong_tokens_per_round
from benchmarks.gpu.engine_report import ok, telling_line
from benchmarks.gpu.models import SHAPES, SMALL_SHAPE, write_model
from benchmarks.gpu.options import add_device, settle

GAMMA = 6
REQUESTS = 128
MIN_BUDGET = 256  # tokens
# Vegas' poster at ICML 2026: Qwen3-8B, 128 requests of AIME25, tokens/s. The policy nearest to its own is
# `verify-topk`; "streamingllm" is its measurement of MagicDec's, "plain" of vLLM.
SOURCE = "Vegas, arXiv 2602.07223, poster"
FIGURES = {
    10_000: {"gpus": "1 x H100", "plain": 940, "streamingllm": 1576, "verify-topk": 1893},
    100_000: {"gpus": "2 x H100", "plain": 98, "streamingllm": 208, "verify-topk": 268},
}
# Its tokens per round at about 10,000 tokens.
TOKENS_PER_ROUND = {"streamingllm": 4.92, "verify-topk": 6.24}

SMALL = {"policies": ["verify-topk"], "context": [512], "requests": 2, "tokens": 48, "turns": 1}
WHOLE = {
    "policies": ["verify-topk", "streamingllm"],
    "context": list(FIGURES),
    "requests": REQUESTS,
    "tokens": 256,
    "turns": 3,
}


def budget_of(context: int, share: float) -> int:
    """Tokens that a draft step reads per request."""
    return max(MIN_BUDGET, round(share * context))


def measure(args: argparse.Namespace, context: int) -> list[Result]:
    """Every policy and plain decoding at one context, with the same number of requests.

    The first engine, of the policy that needs the most memory, measures as many as it holds.
    """
    shape = SMALL_SHAPE if args.small else SHAPES["qwen3-8b"]
    results: list[Result] = []
    batch = args.requests
    with tempfile.TemporaryDirectory(prefix="magicdec-") as directory:
        folder = Path(directory)
        write_model(shape, context + args.tokens + GAMMA + 1, folder)
        model = {"model": args.model} if args.model else random_model(folder)
        for policy in (*args.policies, None):
            spec, per_round = None, None
            if policy is not None:
                spec = {
                    **POLICIES[policy],
                    "method": "magicdec-self",
                    "num_speculative_tokens": GAMMA,
                    "draft_kv_budget": budget_of(context, args.budget_share),
                }
                if not args.model:
                    per_round = TOKENS_PER_ROUND[policy]
                    spec |= {
                        "rejection_sample_method": "synthetic",
                        "synthetic_acceptance_length": per_round,
                    }
            [result], run = run_cells(
                f"{policy or 'plain'} at {context} tokens",
                (
                    "decode_speed",
                    {
                        "tokens": args.tokens,
                        "turns": args.turns,
                        "as_many_as_fit": not ok(results),
                        "text": bool(args.model),
                    },
                ),
                [(batch, context)],
                {
                    "shape": args.model or shape.name,
                    "policy": policy or "plain",
                    "requests": args.requests,
                    "budget": spec and spec["draft_kv_budget"],
                    "gamma": spec and GAMMA,
                    "synthetic_tokens_per_round": per_round,
                },
                args,
                # There a stand-in accepts synthetically, and it is in the engine's process.
                in_one_process=args.device == "cpu",
                max_num_seqs=args.requests,
                speculative_config=spec,
                **model,
            )
            if run is not None and per_round is not None and result["status"] == "ok":
                problem = wrong_tokens_per_round(run, GAMMA, per_round)
                if problem is not None:
                    result |= {"status": "wrong", "reason": problem}
            if result["status"] == "ok":
                batch = result["batch"]
            results.append(result)
    add_speedups(results)
    return results


def add_speedups(results: list[Result]) -> None:
    """Put the speedup over plain decoding, and the peer's, beside the tokens/s of one context."""
    plain = [r["tokens_per_s"] for r in ok(results) if r["policy"] == "plain"]
    for result in results:
        figures = FIGURES.get(result["context"])
        if figures is not None and result["policy"] in figures:
            result["peer"] = {
                "source": SOURCE,
                "gpus": figures["gpus"],
                "tokens_per_s": figures[result["policy"]],
                "speedup": figures[result["policy"]] / figures["plain"],
            }
        if result["status"] == "ok" and plain and result["policy"] != "plain":
            result["speedup"] = result["tokens_per_s"] / plain[0]


def make_table(results: list[Result]) -> str:
    """What is printed."""
    lines = []
    for r in results:
        cell = f"{r['shape']}, {r['context']} tokens, {r['policy']}"
        if r["status"] != "ok":
            lines.append(f"{r['status'].upper()}: {cell}: {telling_line(r['reason'])}")
            continue
        speed = f" = {r['speedup']:.2f} x" if "speedup" in r else ""
        peer = f" ({r['peer']['gpus']}: {r['peer']['speedup']:.2f} x)" if "peer" in r else ""
        accepted = f", {r['acceptance_length']:.2f} tokens per round"
        accepted += " (SYNTHETIC)" if r["synthetic_tokens_per_round"] else ""
        lines.append(
            f"{cell}, {r['batch']} of {r['requests']} requests: {r['tokens_per_s']:.1f} tokens/s{speed}"
            f"{peer}{accepted if r['policy'] != 'plain' else ''}"
        )
    return "\n".join([*lines, f"in brackets: {SOURCE}"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_device(parser, small="a tiny model")
    parser.add_argument(
        "--model", help="with real weights instead of the shape of Qwen3-8B: a folder, a name"
    )
    parser.add_argument("--policies", nargs="+", choices=TOKENS_PER_ROUND)
    parser.add_argument("--context", type=int, nargs="+", help="tokens per request")
    parser.add_argument("--requests", type=int, help="as many of them as fit decode together")
    parser.add_argument("--budget-share", type=float, default=0.06, help="of the context, per draft step")
    parser.add_argument("--tokens", type=int, help="generated per request")
    parser.add_argument("--turns", type=int, help="whose median counts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, help="tokens")
    parser.add_argument("--runner", choices=("v1", "v2"), help="of vLLM")
    add_out(parser)
    args = parser.parse_args(argv)
    of_cpu = {"page_size": 32} if args.device == "cpu" else {}
    settle(parser, args, {**(SMALL if args.small else WHOLE), **of_cpu})
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    results = [result for context in args.context for result in measure(args, context)]
    print(make_table(results))
    record = make_record(
        "gpu peer",
        device=args.device,
        settings=settings_of(args),
        gamma=GAMMA,
        acceptance="the model's own" if args.model else f"synthetic, as reported by {SOURCE}",
        peer={"source": SOURCE, "tokens_per_s": FIGURES, "tokens_per_round": TOKENS_PER_ROUND},
        results=results,
    )
    write(record, args.out)
    if any(result["status"] in ("wrong", "failed") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
