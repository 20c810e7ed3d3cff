# SPDX-License-Identifier: Apache-2.0
"""Draft attention, kernel by kernel: is it right, and how near to the memory's speed is it?

Run as `make bench-gpu`, or `python -m benchmarks.gpu.kernels` from the root of the project. It needs torch,
Triton and FlashInfer, not vLLM. With `--device cpu --small` the same code runs on tiny shapes without a
GPU. See README.md beside this file for what the columns mean.

Every kernel of a cell is checked against dense float32 attention masked to the same tokens before its
clock starts; one that is wrong is not timed, and the exit status says so.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu import stand_in
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.problem import Heads, Layer, View
from benchmarks.machine import describe_machine
from vllm_magicdec.attention import Implementation, KVRows, attend
from vllm_magicdec.attention.flashinfer_attention import (
    WORKSPACE_BYTES,
    FlashInferDecode,
    Geometry,
    make_page_indices,
)

SHAPES = (
    Heads("llama-3.1-8b, qwen3-8b", num_heads=32, num_kv_heads=8, head_size=128),  # the same for both
    Heads("llama-2-7b", num_heads=32, num_kv_heads=32, head_size=128),
)
SMALL_SHAPES = (
    Heads("small gqa", num_heads=8, num_kv_heads=2, head_size=64),  # a group for tensor cores
    Heads("small mha", num_heads=2, num_kv_heads=2, head_size=64),
)
# Largest error as a share of the largest result, as in tests/attention/views_over_a_cache.py.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Share of the floor's bandwidth that a draft kernel should reach ...
GOALS = {"page": 0.85, "token": 0.60}
GOAL_BATCH, GOAL_BUDGET = 32, 512  # ... from here on
SPARE_BYTES = 8 * 2**30  # on a GPU, for everything but the cache
TORCH_BYTES = 4 * 2**30  # most that the torch implementation may gather

PLANS = 5  # timed, of which the median counts


@dataclass(frozen=True)
class Prepared:
    """A kernel made ready for a view."""

    run: Callable[[], torch.Tensor]  # returns [batch, num_heads, head_size]
    plan: Callable[[], None] | None = None  # again; None: it needs no plan


@dataclass(frozen=True)
class Result:
    """One kernel on one cell."""

    shape: str
    batch: int
    context: int  # tokens per request
    budget: int  # tokens of the view; the context for the full-context baseline
    granularity: str  # "full", "page", "token"
    kernel: str
    runs_on: str
    status: str  # "ok", "wrong", "failed", "skipped"
    reason: str = ""
    error: float | None = None  # largest, as a share of the largest result
    time_us: float | None = None
    full_us: float | None = None  # the full-context baseline of the cell
    bytes_read: int | None = None
    floor_us: float | None = None  # bytes_read at the measured copy bandwidth
    share: float | None = None  # floor_us / time_us
    plan_us: float | None = None  # of the host, once for all layers of a step; not in time_us
    goal: float | None = None


# ---- the kernels


def page_flashinfer(layer: Layer, view: View) -> Prepared:
    """FlashInfer over the cache's own pages, all KV heads at once: full context and page views."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    assert view.pages is not None
    batch, num_pages = view.pages.shape
    geometry = _geometry(layer)
    device = layer.query.device
    indptr = torch.arange(batch + 1, dtype=torch.int32) * num_pages
    indices = view.pages.flatten()
    last_page_len = view.lens.cpu() - (num_pages - 1) * layer.page_size
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=geometry.use_tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr, device=device),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last_page_len, device=device),
    )
    planned = geometry.plan_arguments() | dict(
        num_qo_heads=layer.heads.num_heads,
        num_kv_heads=layer.heads.num_kv_heads,
        page_size=layer.page_size,
    )

    def plan() -> None:
        wrapper.plan(indptr, indices, last_page_len, **planned)

    plan()
    return Prepared(lambda: wrapper.run(layer.query, layer.halves), plan)


def token_flashinfer(layer: Layer, view: View) -> Prepared:
    """The library's adapter, the writing of a layer's row numbers included: what a layer costs."""
    decode, rows, slots = _planned(layer, view)
    lens_cpu = view.lens.cpu()
    return Prepared(lambda: decode.run(layer.query, rows, slots), lambda: decode.plan(lens_cpu))


def token_flashinfer_rows_written(layer: Layer, view: View) -> Prepared:
    """FlashInfer's part of that alone."""
    decode, rows, slots = _planned(layer, view)
    decode.run(layer.query, rows, slots)
    return Prepared(lambda: decode.run_again(layer.query, rows))


def token_triton(layer: Layer, view: View) -> Prepared:
    return _attend(layer, view, "triton")


def token_torch(layer: Layer, view: View) -> Prepared:
    return _attend(layer, view, "torch")


KERNELS: dict[str, Callable[[Layer, View], Prepared]] = {
    "page flashinfer": page_flashinfer,
    "token flashinfer": token_flashinfer,
    "token flashinfer, rows written": token_flashinfer_rows_written,
    "token triton": token_triton,
    "token torch": token_torch,
}
FULL = "full flashinfer"  # the baseline: `page_flashinfer` over all pages


def _geometry(layer: Layer) -> Geometry:
    heads, dtype = layer.heads, layer.query.dtype
    return Geometry(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        query_dtype=dtype,
        cache_dtype=dtype,
        scale=heads.head_size**-0.5,
    )


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)


def _rows(layer: Layer) -> KVRows:
    return KVRows.of(layer.kv_cache, "FLASHINFER")


def _planned(layer: Layer, view: View) -> tuple[FlashInferDecode, KVRows, torch.Tensor]:
    assert view.slots is not None
    batch, num_kv_heads, budget = view.slots.shape
    device = layer.query.device
    decode = FlashInferDecode(
        _geometry(layer),
        num_reqs=batch,
        workspace=_workspace(device),
        indices=make_page_indices(batch * num_kv_heads, budget, device),
    )
    decode.plan(view.lens.cpu())
    return decode, _rows(layer), view.slots


def _attend(layer: Layer, view: View, implementation: Implementation) -> Prepared:
    assert view.slots is not None
    rows, slots, scale = _rows(layer), view.slots, _geometry(layer).scale
    return Prepared(
        lambda: attend(layer.query, rows, slots, view.lens, scale=scale, implementation=implementation)
    )


def runs_on(kernel: str, device: torch.device) -> str:
    """What really computes: on a CPU, not what a kernel is named after."""
    if device.type == "cuda":
        return "cuda"
    if "flashinfer" in kernel:
        return "cpu: torch reads what FlashInfer is told to read"
    return "cpu: Triton's interpreter" if "triton" in kernel else "cpu: torch"


# ---- checking and timing


def largest_error(layer: Layer, view: View, result: torch.Tensor) -> float:
    """Of the first and the last request, as a share of the largest result; infinite if any is not finite.

    `result`: [batch, num_heads, head_size].
    """
    if result.shape != layer.query.shape or not bool(result.isfinite().all()):
        return float("inf")
    errors = []
    for request in {0, layer.batch - 1}:
        expected = layer.dense(view, request)
        errors.append(float((result[request].float() - expected).abs().max() / expected.abs().max()))
    return max(errors)


class Bench:
    """Checks, then times.

    Args:
        clock: of the device.
        device: where the kernels run.
        kernels: names of those to run, of `KERNELS`.
        copy_bytes: how much to copy to learn the memory's bandwidth.
    """

    def __init__(self, clock: Clock, device: torch.device, kernels: list[str], copy_bytes: int) -> None:
        self._clock = clock
        self._device = device
        self._kernels = kernels
        source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied_us = clock.median_us(lambda: target.copy_(source))
        self.copy_bytes_per_s = 2 * copy_bytes / copied_us * 1e6  # read and written
        self.empty_us = clock.median_us(lambda: target[:1].zero_())  # the least that this clock shows

    def cell(self, layer: Layer, budgets: list[int]) -> Iterator[Result]:
        """The full-context baseline, then every kernel at every budget."""
        full = self._measure(FULL, page_flashinfer, layer, layer.page_view(layer.context), layer.context)
        yield full
        for budget in budgets:
            views = {"page": layer.page_view(budget), "token": layer.token_view(budget)}
            for name in self._kernels:
                result = self._measure(name, KERNELS[name], layer, views[name.split()[0]], budget)
                yield replace(result, full_us=full.time_us)

    def _measure(
        self, name: str, make: Callable[[Layer, View], Prepared], layer: Layer, view: View, budget: int
    ) -> Result:
        heads, dtype = layer.heads, layer.query.dtype
        granularity, kernel = name.split(" ", 1)
        cell = skipped(heads, layer.batch, layer.context, budget, name, self._device, "")
        # The torch implementation gathers K and V and works on them in float32.
        gathered = layer.batch * budget * heads.bytes_per_token(torch.float32)
        if kernel == "torch" and gathered > TORCH_BYTES:
            return replace(cell, reason=f"torch would gather {gathered / 2**30:.0f} GiB")
        try:
            prepared = make(layer, view)
            error = largest_error(layer, view, prepared.run())
        except Exception as failure:  # whatever compiles or launches it
            return replace(cell, status="failed", reason=f"{type(failure).__name__}: {failure}")
        if not error <= TOLERANCE[dtype]:
            reason = f"off by {error:.1e}, {TOLERANCE[dtype]:.0e} is allowed"
            return replace(cell, status="wrong", reason=reason, error=error)
        time_us = self._clock.median_us(prepared.run)
        bytes_read = layer.bytes_read(view)
        floor_us = bytes_read / self.copy_bytes_per_s * 1e6
        is_judged = self._device.type == "cuda" and layer.batch >= GOAL_BATCH and budget >= GOAL_BUDGET
        is_judged = is_judged and kernel != "torch"  # which is the truth, not a contender
        return replace(
            cell,
            status="ok",
            error=error,
            time_us=time_us,
            bytes_read=bytes_read,
            floor_us=floor_us,
            share=floor_us / time_us,
            plan_us=None if prepared.plan is None else self._clock.host_us(prepared.plan, PLANS),
            goal=GOALS.get(granularity) if is_judged else None,
        )


def skipped(
    heads: Heads, batch: int, context: int, budget: int, name: str, device: torch.device, reason: str
) -> Result:
    granularity, kernel = name.split(" ", 1)
    where = runs_on(kernel, device)
    return Result(heads.name, batch, context, budget, granularity, kernel, where, "skipped", reason)


def free_bytes(device: torch.device) -> int:
    """Memory that a cache may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0] - SPARE_BYTES
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def measure(bench: Bench, args: argparse.Namespace, dtype: torch.dtype) -> Iterator[Result]:
    """All cells; those whose cache does not fit are skipped and say so."""
    device = torch.device(args.device)
    shapes = [heads for heads in SHAPES + SMALL_SHAPES if heads.name in args.shapes]
    for heads in shapes:
        for context in args.context:
            for batch in args.batch:
                cache_bytes = batch * context * heads.bytes_per_token(dtype)
                if cache_bytes > free_bytes(device):
                    reason = f"a cache of {cache_bytes / 2**30:.0f} GiB does not fit"
                    cells = [(FULL, context)] + [(n, b) for b in args.budget for n in args.kernels]
                    for name, budget in cells:
                        yield skipped(heads, batch, context, budget, name, device, reason)
                    continue
                layer = Layer(
                    heads,
                    batch=batch,
                    context=context,
                    page_size=args.page_size,
                    dtype=dtype,
                    device=device,
                    seed=args.seed,
                )
                yield from bench.cell(layer, args.budget)
                del layer  # before the next one is allocated


# ---- what is printed


def make_table(results: list[Result], device: str) -> str:
    """At each shape's longest context with results: the share of the floor's bandwidth, and the speedup."""
    lines = (
        []
        if device == "cuda"
        else ["ON A CPU, with stand-ins for the GPU's kernels: no time says anything"]
    )
    for shape in dict.fromkeys(result.shape for result in results):
        timed = [r for r in results if r.shape == shape and r.status == "ok"]
        if not timed:
            continue
        batches = sorted({r.batch for r in timed})
        longest = {batch: max(r.context for r in timed if r.batch == batch) for batch in batches}
        header = "".join(f"batch {batch:>3} @ {longest[batch]:>6} ".rjust(21) for batch in batches)
        lines += [f"{shape}: share of the floor's bandwidth, speedup over full context", " " * 44 + header]
        rows = dict.fromkeys((r.granularity, r.kernel, r.budget) for r in timed if r.granularity != "full")
        for row in [("full", "flashinfer", 0), *rows]:
            granularity, kernel, budget = row
            name = f"{granularity} {kernel}" + (f", {budget} tokens" if budget else ", all tokens")
            found = {
                r.batch: r
                for r in timed
                if (r.granularity, r.kernel) == (granularity, kernel)
                and r.context == longest[r.batch]
                and budget in (0, r.budget)
            }
            lines.append(name.ljust(44) + "".join(_entry(found.get(batch)).rjust(21) for batch in batches))
        lines.append("")
    counts = {
        status: sum(r.status == status for r in results) for status in ("ok", "wrong", "failed", "skipped")
    }
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    for reason in dict.fromkeys(r.reason for r in results if r.status == "skipped"):
        affected = sum(r.reason == reason for r in results)
        lines.append(f"skipped {affected}: {reason}")
    for r in results:
        if r.status in ("wrong", "failed"):
            cell = f"{r.shape}, batch {r.batch}, context {r.context}, budget {r.budget}"
            lines.append(f"{r.status.upper()}: {r.granularity} {r.kernel} ({cell}): {r.reason}")
    return "\n".join(lines + _plans(results) + _goals(results))


def _entry(result: Result | None) -> str:
    if result is None or result.share is None or result.time_us is None:
        return "-"
    speedup = "" if result.full_us is None else f" {result.full_us / result.time_us:7.2f} x"
    return f"{100 * result.share:6.1f} %{speedup}"


def _plans(results: list[Result]) -> list[str]:
    lines = []
    for shape, kernel in dict.fromkeys(
        (r.shape, f"{r.granularity} {r.kernel}") for r in results if r.plan_us
    ):
        slowest: dict[int, float] = {}
        for r in results:
            if (r.shape, f"{r.granularity} {r.kernel}") == (shape, kernel) and r.plan_us:
                slowest[r.batch] = max(r.plan_us, slowest.get(r.batch, 0))
        times = ", ".join(f"{us / 1000:.2f} ms at batch {batch}" for batch, us in sorted(slowest.items()))
        lines.append(f"host time of a plan, at most: {kernel} ({shape}): {times}")
    return lines


def _goals(results: list[Result]) -> list[str]:
    lines = []
    for name in dict.fromkeys(f"{r.granularity} {r.kernel}" for r in results if r.goal is not None):
        judged = [r for r in results if f"{r.granularity} {r.kernel}" == name and r.goal is not None]
        reached = sum((r.share or 0) >= (r.goal or 1) for r in judged)
        lowest = min(r.share or 0 for r in judged)
        lines.append(
            f"goal for {name}: at least {100 * (judged[0].goal or 0):.0f} % from batch {GOAL_BATCH} and "
            f"budget {GOAL_BUDGET} on; reached in {reached} of {len(judged)} cells, lowest "
            f"{100 * lowest:.1f} %"
        )
    return lines or [
        f"the goals are for GPUs, batch {GOAL_BATCH} and budget {GOAL_BUDGET} or more: not judged"
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [heads.name for heads in SHAPES + SMALL_SHAPES]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes: does it all run?")
    parser.add_argument("--shapes", nargs="+", choices=names, metavar="SHAPE", help=" | ".join(names))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="KERNEL")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--context", type=int, nargs="+", help="tokens per request")
    parser.add_argument("--budget", type=int, nargs="+", help="tokens of a view")
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, help="timed runs, of which the median counts")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    small = {
        "shapes": [heads.name for heads in SMALL_SHAPES],
        "batch": [1, 3],
        "context": [64, 128],
        "budget": [16, 32],
        "repeats": 3,
        "warmup": 1,
    }
    whole = {
        "shapes": [heads.name for heads in SHAPES],
        "batch": [1, 8, 32, 64, 128],
        "context": [4096, 16384, 32768, 65536, 131072],
        "budget": [256, 512, 1024, 2048],
        "repeats": 30,
        "warmup": 5,
    }
    for name, value in (small if args.small else whole).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # Triton's interpreter multiplies bfloat16 wrongly, and a CPU gains nothing from it.
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.device == "cpu" and not args.small:
        parser.error("on a CPU everything is slow: use --device cpu --small")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; use --device cpu --small to see that it runs")
    if any(size % args.page_size for size in (*args.context, *args.budget)):
        parser.error(f"contexts and budgets must be multiples of the page size, {args.page_size}")
    if max(args.budget) > min(args.context):
        parser.error("no budget may exceed a context")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cpu":
        # Triton decides when it is imported, which the library does at its first use.
        os.environ["TRITON_INTERPRET"] = "1"
        stand_in.install()
        torch.set_num_threads(1)  # shapes are tiny, and threads that wait for a core are all one would time
    dtype = getattr(torch, args.dtype)
    device = torch.device(args.device)
    clock = Clock(device, repeats=args.repeats, warmup=args.warmup)
    bench = Bench(clock, device, args.kernels, copy_bytes=2**30 if device.type == "cuda" else 2**24)
    results = []
    for result in measure(bench, args, dtype):
        results.append(result)
        if sys.stderr.isatty():
            print(
                f"\r{len(results)} measured: {result.shape}, batch {result.batch}", end="", file=sys.stderr
            )
    print(make_table(results, args.device))
    record = {
        "benchmark": "gpu kernels",
        "date": datetime.now(UTC).date().isoformat(),
        "device": args.device,
        "machine": describe_machine(),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "clock": clock.description,
        "copy_bytes_per_s": bench.copy_bytes_per_s,
        "empty_us": bench.empty_us,
        "tolerance": TOLERANCE[dtype],
        "results": [asdict(result) for result in results],
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {args.out}")
    if any(result.status in ("wrong", "failed") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
