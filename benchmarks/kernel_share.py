# SPDX-License-Identifier: Apache-2.0
"""Split a speedup on a CPU into the parts of the attention kernel and of speculation.

Three engines run at the same time: plain vLLM, and magicdec-self with the plugin's attention kernel and
with vLLM's. On every cell (batch x context) four contenders take turns:

- plain: vLLM without the plugin;
- kernel: the engine with the kernel, its controller pinned to no drafts;
- speculation: the engine with vLLM's attention, pinned to `--gamma` drafts;
- both: the engine with the kernel, pinned to `--gamma` drafts.

Timing is that of decode.py. Factors are medians of the turns' ratios.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from auto import MIN_TOKENS, controller_of, pinned
from common.decoding import Decoding, decode, medians
from common.documents import describe_documents, prompts_of_cells
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.options import add_cells, add_documents, add_model, add_out, make_parser
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import KV_HEAVY, model_folder
from rich.table import Table

from vllm_magicdec.adaptive.value import Choice
from vllm_magicdec.planner.profile import fill_prefix_cache

# Speed of the first contender over that of the second.
FACTORS = {
    "kernel alone": ("kernel", "plain"),
    "speculation alone": ("speculation", "plain"),
    "speculation beside the kernel": ("both", "kernel"),
    "kernel beside speculation": ("both", "speculation"),
    "both": ("both", "plain"),
}


def measure_cell(
    plain: Any, with_kernel: Any, without: Any, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure all contenders in turns on one cell."""
    for llm in (plain, with_kernel, without):
        fill_prefix_cache(llm, prompts)
    turn = Turn()
    for llm in (with_kernel, without):  # the controller must know step times before it is pinned
        decode(turn.of(llm), prompts, MIN_TOKENS)

    def run_pinned(llm: Any, gamma: int) -> Decoding:
        controller = controller_of(turn.of(llm))
        with pinned(controller, Choice(gamma)):
            return decode(llm, prompts, args.tokens)

    turns = take_turns(
        {
            "plain": lambda: decode(turn.of(plain), prompts, args.tokens),
            "kernel": lambda: run_pinned(with_kernel, 0),
            "speculation": lambda: run_pinned(without, args.gamma),
            "both": lambda: run_pinned(with_kernel, args.gamma),
        },
        args.turns,
    )
    speeds = {name: [one.tokens_per_s for one in own] for name, own in turns.items()}
    return {
        "batch": len(prompts),
        "context": len(prompts[0]),
        "contenders": {name: asdict(medians(own)) for name, own in turns.items()},
        "factors": {
            name: statistics.median(a / b for a, b in zip(speeds[first], speeds[second], strict=True))
            for name, (first, second) in FACTORS.items()
        },
        "all_turns": {name: [asdict(one) for one in own] for name, own in turns.items()},
    }


def table_of(record: Mapping[str, Any]) -> Table:
    """Return a table of a record's cells."""
    title = f"{record['engine']['model']}, {record['engine']['dtype']}, gamma {record['gamma']}"
    contenders = ("plain", "kernel", "speculation", "both")
    speeds = [f"{name} tok/s" for name in contenders]
    columns = ("batch", "context", *speeds, "acceptance length", *FACTORS)
    table = make_table(f"{title}, budget {record['budget']:g} ({record['policy']})", columns)
    for cell in record["cells"]:
        table.add_row(
            *(str(cell["batch"]), f"{cell['context']:,}"),
            *(f"{cell['contenders'][name]['tokens_per_s']:.0f}" for name in contenders),
            f"{cell['contenders']['both']['acceptance_length']:.2f}",
            *(f"{factor:.2f}" for factor in cell["factors"].values()),
        )
    return table


def run(args: argparse.Namespace, model: str) -> None:
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": "auto",
        "draft_lookup": "off",
        "draft_kv_policy": args.policy,
        "draft_kv_budget": args.budget,
    }
    # As in a server, a worker process computes on the threads that vLLM assigns to it.
    settings = engine_settings(
        model,
        args.dtype,
        batch=max(args.batch),
        model_len=max(args.context) + max(args.tokens, MIN_TOKENS) + 2 * PAGE,
        distributed_executor_backend="mp",
    )
    record = engine_record(
        "kernel_share",
        args.model,
        settings,
        policy=args.policy,
        budget=args.budget,
        gamma=args.gamma,
        tokens=args.tokens,
        turns=args.turns,
        documents=describe_documents(args.documents),
    )
    cells = []
    with (
        engine(settings) as plain,
        engine(settings, {**spec, "native_attention": True}) as with_kernel,
        engine(settings, {**spec, "native_attention": False}) as without,
    ):
        for prompts in prompts_of_cells(plain.get_tokenizer(), args.batch, args.context, args.documents):
            cells.append(measure_cell(plain, with_kernel, without, prompts, args))
            console.print(f"batch {len(prompts)}: {cells[-1]['factors']}", markup=False)
    record["cells"] = cells
    console.print(table_of(record))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=KV_HEAVY)
    add_cells(parser, batch=[8], context=[16000])
    parser.add_argument("--tokens", type=int, default=96, help="generated per request and turn")
    parser.add_argument("--gamma", type=int, default=8, help="drafted tokens per round")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--budget", type=float, default=1024)
    parser.add_argument("--turns", type=int, default=5, help="per contender and cell")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    # The schedulers run in this process, so that their controllers are accessible.
    set_environment(kv_cache_gib=3, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
