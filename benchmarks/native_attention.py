# SPDX-License-Identifier: Apache-2.0
"""Compare the plugin's CPU attention with vLLM's for one layer, in one process and in turns.

A cell is one layer's attention of a batch of equal requests over a KV cache in random pages, in every
variant that this machine runs. A call is a layer's `impl.forward` on both sides, including its Python,
but not the write of the cache or the work that a step does once for all layers. Shares are relative to a
copy's bandwidth (bytes read and written) and to the rate of a large matrix product in bfloat16 (AMX,
AVX512_BF16) or float32 (others, and AVX512_BF16 with an fp8 cache). Copy and products take turns in every
cell, because the speed of a shared machine varies. Where vLLM packs the cache for AMX, the AMX variant
reads that layout, and the others read the layout for vectors.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from common.clock import seconds
from common.machine import measured_rates
from common.options import add_out, make_parser, settings_of
from common.plots import plt, save
from common.record import make_record, write
from common.tables import console, make_table
from rich.table import Table

from vllm_magicdec.attention import native_attention as native_layers
from vllm_magicdec.native import huge_pages
from vllm_magicdec.native.library import VARIANTS, load, variants_here

PAGE = 32  # tokens
SHAPES = {"kv-heavy": (8, 8, 64), "llama-3.1-8b": (32, 8, 128)}  # heads, KV heads, head size
CELLS = ((1, 1024), (32, 1024), (8, 4096), (1, 16384), (8, 16384), (1, 65536))
QUERY_LENS = (1, 2, 4, 5, 8, 9, 16)
# Of these the table of a page.
PAGE_CELLS, PAGE_QUERY_LENS = ((32, 1024), (8, 16384), (1, 65536)), (1, 4, 5, 9, 16)
# What shares are of: bytes on either side of a copy, and rows of a square matrix.
COPY_BYTES, MATRIX_SIZE = 512 << 20, 1024
TIMED = "impl.forward"  # of records without it: of vLLM's the operator, of ours the call of the kernel
LEAST_ROUNDS, LEAST_MS = 3, 20  # of all contenders in a turn
# By vLLM's names.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def make_cell(
    shape: str, batch: int, context: int, cache_dtype: torch.dtype, *, small_pages: bool = False
) -> dict[str, Any]:
    """Create a cache in random pages and its block table; the pages have equal content."""
    _, num_kv_heads, head_size = SHAPES[shape]
    pages = -(-context // PAGE)
    cache = torch.zeros(batch * pages, num_kv_heads, PAGE, 2 * head_size, dtype=cache_dtype)
    in_huge_pages = not small_pages and huge_pages.on_demand() and huge_pages.move_to_huge_pages(cache)
    cache[:] = torch.randn(1, *cache.shape[1:])
    return {
        "cache": cache,
        "in_huge_pages": in_huge_pages,
        "block_table": torch.randperm(batch * pages).view(batch, pages).int(),
        "context_lens": torch.full((batch,), context, dtype=torch.int32),
    }


def layer_of(shape: str, dtype: torch.dtype, kv_cache_dtype: str, isa: str) -> SimpleNamespace:
    """As much of a layer of vLLM's on CPUs as its attention looks at."""
    from vllm.v1.attention.backends import cpu_attn

    num_heads, num_kv_heads, head_size = SHAPES[shape]
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    with mock.patch.object(cpu_attn, "get_current_vllm_config", lambda: config):
        impl = cpu_attn.CPUAttentionBackendImpl(
            num_heads, head_size, head_size**-0.5, num_kv_heads, None, None, kv_cache_dtype
        )
    return SimpleNamespace(
        impl=impl,
        attn_backend=cpu_attn.CPUAttentionBackend,
        isa=isa,
        kv_cache_dtype=kv_cache_dtype,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


def contenders_of(
    shape: str,
    cell: Mapping[str, Any],
    query_len: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
) -> dict[str, Callable[[], torch.Tensor]]:
    """A layer's attention by vLLM's kernel and by the plugin's variants, on the same tensors."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    num_heads, num_kv_heads, head_size = SHAPES[shape]
    lens = cell["context_lens"]
    cache = cell["cache"] if kv_cache_dtype == "auto" else cell["cache"].view(torch.uint8)
    num_tokens = len(lens) * query_len
    starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32)
    query = torch.randn(num_tokens, num_heads, head_size).to(dtype)
    isa = _get_attn_isa(dtype, PAGE, head_size, kv_cache_dtype)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        seq_lens=lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        kv_cache_dtype=kv_cache_dtype,
    )
    metadata = CPUAttentionMetadata(
        num_actual_tokens=num_tokens,
        max_query_len=query_len,
        query_start_loc=starts,
        max_seq_len=int(lens.max()),
        seq_lens=lens,
        block_table=cell["block_table"],
        slot_mapping=torch.empty(0),
        scheduler_metadata=plan,
    )
    spec = FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=cache.dtype,
        kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
    )
    layers = {"vllm": layer_of(shape, dtype, kv_cache_dtype, isa)}
    for variant in variants_here():
        if variant.path.exists() and variant.name != "portable":
            own_isa = isa if variant.name == isa else "vec"
            layer = layers[variant.name] = layer_of(shape, dtype, kv_cache_dtype, own_isa)
            layer.impl.forward = None  # what the variant does not take fails
            native_layers.NativeAttention(layer, spec, load(variant))
    return {
        name: functools.partial(
            layer.impl.forward,
            layer,
            query,
            None,  # keys and values: they are in the cache
            None,
            cache,
            metadata,
            output=torch.empty_like(query),
            output_scale=None,
            output_block_scale=None,
        )
        for name, layer in layers.items()
    }


def references_of(products: Iterable[str]) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return for each rate in `measured_rates` its value at 1 ms, and the work that measures it."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    found: dict[str, tuple[float, Callable[[], object]]] = {
        "copy_gb_per_s": (2 * COPY_BYTES / 1e6, functools.partial(target.copy_, source))
    }
    for name in products:
        matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE).to(DTYPES[name])
        product = functools.partial(torch.mm, matrix, matrix.T, out=torch.empty_like(matrix))
        found[f"{name}_gflops"] = (2 * MATRIX_SIZE**3 / 1e6, product)
    return found


def measure(
    contenders: Mapping[str, Callable[[], object]],
    references: Mapping[str, tuple[float, Callable[[], object]]],
    turns: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return each turn's milliseconds of the contenders and rates of the references.

    A contender runs after another contender, and a reference after itself. Because caches and predictors
    are cold after a reference, a turn repeats all contenders at least `LEAST_ROUNDS` times and for
    `LEAST_MS`, and takes the median.
    """
    names = list(contenders)
    ms: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in references}
    for work in contenders.values():
        work()
    num_rounds = max(
        LEAST_ROUNDS, math.ceil(LEAST_MS / sum(1e3 * seconds(work) for work in contenders.values()))
    )
    for turn in range(turns):
        for name, (rate_of_1_ms, work) in references.items():
            work()
            rates[name].append(rate_of_1_ms / (1e3 * seconds(work)))
        first = turn % len(names)
        order = names[first:] + names[:first]
        contenders[order[-1]]()
        rounds = [[1e3 * seconds(contenders[name]) for name in order] for _ in range(num_rounds)]
        for name, of_turn in zip(order, zip(*rounds, strict=True), strict=True):
            ms[name].append(statistics.median(of_turn))
    return ms, rates


def medians(of_turns: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in of_turns.items()}


def measure_shape(shape: str, record: Mapping[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of a shape. `record`: has the run's machine and settings."""
    num_heads, _, head_size = SHAPES[shape]
    dtype, stored_as = DTYPES[args.dtype], args.kv_cache_dtype
    products = {product_of(record, variant.name) for variant in variants_here()}
    references = references_of(sorted(products))
    rows = []
    for batch, context in CELLS:
        cache_dtype = FP8_DTYPES.get(stored_as, dtype)
        cell = make_cell(shape, batch, context, cache_dtype, small_pages=args.small_pages)
        for query_len in args.query_lens:
            with torch.inference_mode():  # as vLLM's steps; the cache is made before
                contenders = contenders_of(shape, cell, query_len, dtype, stored_as)
                ms, rates = measure(contenders, references, args.turns)
            row = {
                "shape": shape,
                "batch": batch,
                "context": context,
                "query_len": query_len,
                "cache_bytes": cell["cache"].nbytes,
                "in_huge_pages": cell["in_huge_pages"],
                "flop": 4 * batch * context * query_len * num_heads * head_size,
                "ms": medians(ms),
                "turns": {"ms": ms, "rates": rates},
            }
            console.print(shape, f"{batch} x {context}", query_len, row["ms"])
            console.file.flush()
            rows.append(row)
    return rows


def product_of(record: Mapping[str, Any], variant: str) -> str:
    """Return the dtype of the matrix product with which to compare a variant.

    On a machine with AMX the bfloat16 product is AMX's, which AVX512_BF16 cannot reach.
    """
    has_amx = "amx_bf16" in record["machine"].get("instruction_sets", "")
    settings = record["settings"]
    dtypes = settings.get("dtype", "bfloat16"), settings.get("kv_cache_dtype", "auto")
    is_bfloat16 = variant == "amx" or (
        variant == "avx512_bf16" and dtypes == ("bfloat16", "auto") and not has_amx
    )
    return "bfloat16" if is_bfloat16 else "float32"


def shares_of(record: Mapping[str, Any], row: Mapping[str, Any], variant: str) -> tuple[float, float]:
    """Return the shares of copy bandwidth and matrix product, medians over the turns.

    Records from before 27 November 2026 have only the rates at the start of the run.
    """
    product = f"{product_of(record, variant)}_gflops"
    if "turns" not in row:
        ms, rates = [row["ms"][variant]], {name: [rate] for name, rate in record["machine"].items()}
    else:
        ms, rates = row["turns"]["ms"][variant], row["turns"]["rates"]
    of_copy, of_product = (
        statistics.median(work / 1e6 / one / rate for one, rate in zip(ms, rates[name], strict=True))
        for name, work in (("copy_gb_per_s", row["cache_bytes"]), (product, row["flop"]))
    )
    return of_copy, of_product


def roofs_of(record: Mapping[str, Any]) -> Mapping[str, float]:
    """Return rates by their names in `measured_rates`, of all turns or of the start of the run."""
    turns: dict[str, list[float]] = {}
    for row in record["rows"]:
        for name, rates in row.get("turns", {}).get("rates", {}).items():
            turns.setdefault(name, []).extend(rates)
    return record["machine"] | medians(turns)


def table_of(record: Mapping[str, Any]) -> Table:
    """Return a table with a row per cell and variant."""
    times = ("vLLM ms", "variant", "ms", "faster", "of q = 1", "of copy", "of matmul")
    columns = ("heads", "batch x context", "q", *times)
    settings = record["settings"]
    dtype, cache = settings.get("dtype", "bfloat16"), settings.get("kv_cache_dtype", "auto")
    table = make_table(f"Attention of one layer in {dtype}, KV cache: {cache}", columns)
    first: dict[tuple[Any, ...], float] = {}
    for row in record["rows"]:
        for name, ms in row["ms"].items():
            base = first.setdefault((row["shape"], row["batch"], row["context"], name), ms)
            if name == "vllm":
                continue
            of_copy, of_matrices = shares_of(record, row, name)
            table.add_row(
                row["shape"],
                f"{row['batch']} x {row['context']:,}",
                str(row["query_len"]),
                f"{row['ms']['vllm']:.2f}",
                name,
                f"{ms:.2f}",
                f"{row['ms']['vllm'] / ms:.2f}",
                f"{ms / base:.2f}",
                f"{of_copy:.0%}",
                f"{of_matrices:.0%}",
            )
    return table


def page_table_of(record: Mapping[str, Any]) -> Table:
    """Return a table in ms of cells larger than the caches, with shares of the best variant.

    If the best variant reads the AMX layout, the others have no column.
    """
    rows = record["rows"]
    names = [name for name in rows[0]["ms"] if name != "vllm"]
    best = names[0]
    shown = names[:1] if best == "amx" else names
    of_names = {variant.name: variant.description for variant in VARIANTS}
    shares = ("of its q = 1", "of the copy bandwidth", "of matrices")
    columns = ("query tokens", "vLLM", *(of_names[name] for name in shown), "faster by", *shares)
    table = make_table("Attention of one layer", columns, names=["heads", "batch x context"])
    for row in rows:
        cell = row["batch"], row["context"]
        if cell not in PAGE_CELLS or row["query_len"] not in PAGE_QUERY_LENS:
            continue
        num_heads, num_kv_heads, head_size = SHAPES[row["shape"]]
        of_cell = (
            r["ms"][best] for r in rows if r["shape"] == row["shape"] and (r["batch"], r["context"]) == cell
        )
        ms = row["ms"]
        of_copy, of_matrices = shares_of(record, row, best)
        table.add_row(
            f"{num_heads}/{num_kv_heads} of {head_size}",
            f"{row['batch']} x {row['context']:,}",
            str(row["query_len"]),
            *(f"{ms[name]:.1f}" for name in ("vllm", *shown)),
            f"{ms['vllm'] / ms[best]:.1f}",
            f"{ms[best] / next(of_cell):.2f}",
            f"{of_copy:.0%}",
            f"{of_matrices:.0%}".replace("%", " %"),
        )
    return table


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Roofline: FLOP/s by FLOP per byte of the KV cache."""
    rates = roofs_of(record)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    names = list(record["rows"][0]["ms"])
    for color, name in enumerate(names):
        for marker, shape in zip("os", SHAPES, strict=True):
            rows = [row for row in record["rows"] if row["shape"] == shape]
            axes.scatter(
                [row["flop"] / row["cache_bytes"] for row in rows],
                [row["flop"] / row["ms"][name] / 1e6 for row in rows],
                s=14,
                marker=marker,
                color=f"C{color}",
                label=f"{'vLLM' if name == 'vllm' else name}, {shape}",
            )
    intensities = [2**power for power in range(9)]
    for dtype in ("float32", "bfloat16"):
        peak = rates[f"{dtype}_gflops"]
        roof = [min(peak, rates["copy_gb_per_s"] * intensity) for intensity in intensities]
        axes.plot(
            intensities, roof, color="black", linewidth=0.8, linestyle=":" if dtype == "float32" else "-"
        )
        axes.annotate(f"matmul in {dtype}", (intensities[-1], peak), ha="right", va="bottom", fontsize=8)
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of KV cache", ylabel="GFLOP/s", ylim=(5, None)
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--query-lens", nargs="+", type=int, default=list(QUERY_LENS))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", *FP8_DTYPES), default="auto", help="auto: the model's"
    )
    parser.add_argument(
        "--small-pages",
        action="store_true",
        help="the cache as vLLM alone has it, where the plugin moves it to huge pages of the system",
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser, "; a roofline plot goes beside it")
    args = parser.parse_args()

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(args.threads)
    record = make_record("native_attention", settings=settings_of(args), timed=TIMED)
    # Rates with this process's threads, whose number may differ from vLLM's worker.
    record["machine"] |= {"worker_threads": args.threads, **measured_rates()}
    is_faster = native_layers.is_faster

    # These times decide which calls use vLLM's kernel, so measure ours for all calls.
    def never_left_to_vllm(*work: Any, is_fp8: bool) -> bool:
        is_faster(*work, is_fp8=is_fp8)
        return True

    with mock.patch.object(native_layers, "is_faster", never_left_to_vllm):
        record["rows"] = [row for shape in args.shapes for row in measure_shape(shape, record, args)]
    console.print(table_of(record))
    write(record, args.out)
    if args.out is not None:
        plot(record, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
