# SPDX-License-Identifier: Apache-2.0
"""How many tokens of the target the KV cache has room for beside a draft model, of the same bytes.

Engines one after the other: plain vLLM, vLLM's `draft_model`, `magicdec` with the same draft and a cache of
every token, the same with a ring for sinks and window (`--window` tokens in all), and, to show what vLLM
makes of a window, its `draft_model` with a copy of that draft all of whose layers have one (the text that
it drafts is of no account here). What vLLM reports at start-up is noted:
blocks, groups of layers, and tokens of requests of the model's length.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.engines import engine, engine_settings, set_environment
from common.machine import vllm_environment
from common.options import add_model, add_out, make_parser
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

TINY_DRAFT = Path(__file__).parent / "tiny-draft"


@contextmanager
def with_window(draft: Path, tokens: int) -> Iterator[str]:
    """A copy of a Llama all of whose layers have a window: vLLM's Mistral has the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(draft, Path(folder, "draft"))
        config = json.loads((copy / "config.json").read_text())
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": tokens,
        }
        (copy / "config.json").write_text(json.dumps(config))
        yield str(copy)


def measure(settings: dict[str, Any], spec: dict[str, Any] | None) -> dict[str, Any]:
    """What an engine's KV cache holds."""
    with engine(settings, spec) as llm:
        core = llm.llm_engine.engine_core.engine_core
        config = core.vllm_config.cache_config
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        return {
            "tokens": config.kv_cache_size_tokens,
            "blocks": config.num_gpu_blocks,
            "groups": [
                {"layers": len(group.layer_names), "spec": type(group.kv_cache_spec).__name__}
                for group in groups
            ],
        }


def table_of(record: Mapping[str, Any]) -> Table:
    """A record's engines."""
    columns = ("tokens of the target", "of plain", "groups of layers")
    model, window = record["engine"]["model"], record["window"]
    table = make_table(f"{model}: room in {record['kv_cache_gib']} GiB", columns, ["draft"])
    names = {
        "plain": "none",
        "draft_model": "`draft_model`",
        "magicdec": "`magicdec`",  # of records from before there were rings
        "whole": "`magicdec`, `draft_kv_cache: whole`",
        "ring": f"`magicdec`, a ring for {window}",
        "window": f"`draft_model`, layers with a window of {window}",
    }
    plain = record["engines"]["plain"]["tokens"]
    for name, found in record["engines"].items():
        groups = " + ".join(str(group["layers"]) for group in found["groups"])
        table.add_row(names[name], f"{found['tokens']:,}", f"{found['tokens'] / plain:.3f}", groups)
    return table


def run(args: argparse.Namespace, model: str) -> None:
    settings = engine_settings(
        model,
        args.dtype,
        batch=8,
        model_len=args.model_len,
        max_num_batched_tokens=args.chunk,
    )
    record = make_record(
        "kv_tokens",
        environment=vllm_environment(),
        engine={**settings, "model": Path(args.model).name},
        draft=args.draft.name,
        window=args.window,
        kv_cache_gib=1,
    )
    draft = {"model": str(args.draft), "num_speculative_tokens": 4}
    sparse = {"method": "magicdec", "draft_kv_budget": args.window, **draft}
    with with_window(args.draft, args.window) as windowed:
        specs = {
            "plain": None,
            "draft_model": {"method": "draft_model", **draft},
            "whole": sparse,
            "ring": {**sparse, "draft_kv_cache": "ring"},
            "window": {"method": "draft_model", **draft, "model": windowed},
        }
        record["engines"] = {name: measure(settings, spec) for name, spec in specs.items()}
    console.print(table_of(record))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=str(TINY_LLAMA))
    parser.add_argument("--draft", type=Path, default=TINY_DRAFT, help="folder of a Llama")
    parser.add_argument("--model-len", type=int, default=8192, help="tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a step, at most")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    add_out(parser)
    args = parser.parse_args()
    # The scheduler must be within reach.
    set_environment(kv_cache_gib=1, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
