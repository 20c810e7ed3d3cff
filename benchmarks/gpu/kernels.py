# SPDX-License-Identifier: Apache-2.0
"""Draft attention, kernel by kernel: is it right, and how near to the memory's speed is it?

Run as `make bench-gpu`, or `python -m benchmarks.gpu.kernels` from the root of the project. It needs torch,
Triton and FlashInfer, not vLLM. With `--device cpu --small` the same code runs on tiny shapes without a
GPU. See README.md beside this file for what the columns mean.

Every kernel of a cell is checked against dense float32 attention masked to the same tokens before its
clock starts; one that is wrong is not timed, and the exit status says so.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from benchmarks.common.options import add_out, make_parser, settings_of
from benchmarks.common.record import make_record, write
from benchmarks.gpu import stand_in
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.draft_attention import FULL, KERNELS, Prepared, page_flashinfer, runs_on
from benchmarks.gpu.kernel_report import GOAL_BATCH, GOAL_BUDGET, GOALS, Result, judge, make_table
from benchmarks.gpu.options import add_device, settle
from benchmarks.gpu.problem import Heads, Layer, View

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
SPARE_BYTES = 8 * 2**30  # on a GPU, for everything but the cache
TORCH_BYTES = 4 * 2**30  # most that the torch implementation may gather

PLANS = 5  # timed, of which the median counts


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
                sizes = {"batch": batch, "context": context, "page_size": args.page_size}
                layer = Layer(heads, **sizes, dtype=dtype, device=device, seed=args.seed)
                yield from bench.cell(layer, args.budget)
                del layer  # before the next one is allocated


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = [heads.name for heads in SHAPES + SMALL_SHAPES]
    add_device(parser, small="tiny shapes")
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
    add_out(parser)
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
    # Triton's interpreter multiplies bfloat16 wrongly, and a CPU gains nothing from it.
    dtype = {"dtype": "bfloat16" if args.device == "cuda" else "float32"}
    settle(parser, args, {**(small if args.small else whole), **dtype})
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
    record = make_record(
        "gpu kernels",
        device=args.device,
        settings=settings_of(args),
        clock=clock.description,
        copy_bytes_per_s=bench.copy_bytes_per_s,
        empty_us=bench.empty_us,
        tolerance=TOLERANCE[dtype],
        goals=judge(results),
        results=[asdict(result) for result in results],
    )
    write(record, args.out)
    if any(result.status in ("wrong", "failed") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
