# SPDX-License-Identifier: Apache-2.0
"""Measured T_T, T_D and T_V beside the roofline's, and a profile of where the time goes.

- RESULT ...: results of decode.py. Each is compared with the roofline of the device it was measured on: of
  a GPU by its data sheet, of a CPU as measured now, and so only on the machine that the result is of.
- --profile, on a CPU: a plain step and a round in the real engine, by what they spend their time on; what
  their attention makes of the memory bandwidth and the FLOP/s; the attention kernel alone, for every number
  of queries; and the costs that follow, for `magicdec plan --costs`. Results are then compared with the
  roofline at those costs, too.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.eq2 import MAX_DIFFERENCE, differs, this_deployment
from kv_heavy import KV_HEAVY, TINY_LLAMA, model_folder
from machine import describe_machine
from rich.console import Console
from rich.table import Table

from vllm_magicdec.planner.hardware import worker_threads
from vllm_magicdec.planner.performance import Deployment, ModelShape
from vllm_magicdec.planner.plan import find_model

PAGE = 32  # tokens
SCOPE = "gpu_model_runner: "  # vLLM's names for the parts of a step begin with it
DRAFTING = "drafting: "
REPEATS = 5
STEPS = 8  # that are profiled, and as many that are timed without the profiler
ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
console = Console(highlight=False, width=150)


@dataclass(frozen=True)
class Comparison:
    """One time of one cell."""

    batch: int
    context: int  # tokens per request
    time: str  # T_T, T_D or T_V
    measured_ms: float
    roofline_ms: Mapping[str, float]  # by the name of the costs


def compare(record: Mapping[str, Any], deployments: Mapping[str, Deployment]) -> list[Comparison]:
    """Every time that a result of decode.py has, beside the roofline's.

    Args:
        record: the JSON file.
        deployments: its model on its device, by the name of the costs.
    """
    gamma = record["speculative_config"]["num_speculative_tokens"]
    share_or_tokens = record["speculative_config"]["draft_kv_budget"]
    comparisons = []
    for row in sorted(record["rows"], key=lambda row: (row["context"], row["batch"])):
        batch, context = row["batch"], row["context"]
        budget = int(share_or_tokens if share_or_tokens > 1 else share_or_tokens * context)
        comparisons += [
            Comparison(
                batch, context, time, measured, {n: d.forward_ms(*cell) for n, d in deployments.items()}
            )
            for time, measured, cell in (
                ("T_T", row["plain_step_ms"], (batch, 1, context)),
                ("T_D", row["draft_step_ms"], (batch, 1, min(budget, context))),
                (f"T_V({gamma})", row["verification_ms"], (batch, gamma + 1, context)),
            )
        ]
    return comparisons


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two of `describe_machine` are the same device."""
    return all(one.get(name) == other.get(name) for name in ("processor", "cores", "gpu"))


def describe(machine: Mapping[str, Any]) -> str:
    return str(machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores")


def deployment_of(
    shape: ModelShape, machine: Mapping[str, Any], here: Mapping[str, Any], known: dict[str, Deployment]
) -> Deployment:
    """The model on the device that a result was measured on.

    Args:
        known: by the name of the GPU, or "" for this CPU; grows, so that each is measured once.

    Raises:
        SystemExit: that is another machine, and there is no data sheet of it.
    """
    gpu = machine.get("gpu", "")
    if gpu not in known:
        known[gpu] = this_deployment(shape, gpu)
    if known[gpu].hardware.source == "measured here" and not same_machine(machine, here):
        raise SystemExit(
            f"the result is of {describe(machine)}, this is {describe(here)}; "
            "there is no data sheet of the former, so compare where it was measured"
        )
    return replace(known[gpu], shape=shape)


# ---- the attention kernel alone


class CpuAttention:
    """vLLM's CPU attention over K/V that are as large as in the engine, layer after layer.

    Args:
        shape: of the model.
        num_pages: that hold the K/V of all requests.
    """

    def __init__(self, shape: ModelShape, num_pages: int) -> None:
        import torch
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self.shape = shape
        self.dtype = torch.bfloat16 if shape.kv_bytes == 2 else torch.float32
        self.isa = _get_attn_isa(self.dtype, PAGE, shape.head_size)
        # [layers, pages, KV heads, K then V rows, head size]; written, for untouched memory is one page.
        self.cache = torch.full(
            (shape.num_layers, num_pages, shape.num_kv_heads, 2 * PAGE, shape.head_size),
            0.01,
            dtype=self.dtype,
        )

    def ms(self, batch: int, queries: int, context: int) -> float:
        """Median time of all layers' attention of `queries` tokens per request."""
        import torch
        from vllm import _custom_ops as ops

        shape, pages = self.shape, -(-context // PAGE)
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
        lengths = torch.full((batch,), context, dtype=torch.int32)
        starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32)
        query = torch.randn(batch * queries, shape.num_heads, shape.head_size).to(self.dtype)
        output = torch.empty_like(query)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

        def run_ms() -> float:
            started = time.perf_counter()
            for layer in self.cache:
                keys, values = layer.chunk(2, dim=2)
                ops.cpu_attention_with_kv_cache(
                    query=query,
                    key_cache=keys,
                    value_cache=values,
                    output=output,
                    query_start_loc=starts,
                    seq_lens=lengths,
                    scale=shape.head_size**-0.5,
                    causal=True,
                    alibi_slopes=None,
                    sliding_window=-1,
                    block_table=table,
                    softcap=0.0,
                    scheduler_metadata=plan,
                    s_aux=None,
                )
            return 1e3 * (time.perf_counter() - started)

        run_ms()
        return statistics.median(run_ms() for _ in range(REPEATS))


@dataclass(frozen=True)
class Achieved:
    """What attention over a batch makes of the machine."""

    ms: float
    bytes_per_s: float  # K/V once
    memory_share: float  # of the copy bandwidth
    flops: float
    compute_share: float  # of the bf16 matmul's

    @classmethod
    def of(cls, ms: float, deployment: Deployment, batch: int, queries: int, context: int) -> "Achieved":
        """From its time: the roofline's bytes and FLOP over it."""
        compute_ms, memory_ms = deployment.attention_ms(batch, queries, context)
        flops, bandwidth = deployment.hardware.flops, deployment.hardware.memory_bytes_per_s
        costs = deployment.costs
        memory_share = memory_ms * costs.memory_efficiency / ms
        compute_share = compute_ms * costs.compute_efficiency / ms
        return cls(ms, memory_share * bandwidth, memory_share, compute_share * flops, compute_share)


# ---- a step of the engine, inside the worker


def count_threads(worker: Any) -> int:
    import torch

    return torch.get_num_threads()


def start_profiler(worker: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    worker.magicdec_profiler = profile(activities=[ProfilerActivity.CPU])
    worker.magicdec_profiler.start()


def stop_profiler(worker: Any) -> tuple[int, list[tuple[list[str], float]]]:
    """Number of steps, and every operation's time: (names from the outermost range to it, ms by itself).

    The steps are counted here because the engine may have sent one more than it has results of.
    """
    worker.magicdec_profiler.stop()
    times: dict[tuple[str, ...], float] = {}
    num_steps = 0
    for event in worker.magicdec_profiler.events():
        num_steps += event.name == "gpu_model_runner: forward"
        path, caller = [event.name], event.cpu_parent
        while caller is not None:
            path.append(caller.name)
            caller = caller.cpu_parent
        key = tuple(reversed(path))
        times[key] = times.get(key, 0.0) + event.self_cpu_time_total / 1e3
    return num_steps, [(list(key), ms) for key, ms in times.items()]


# ---- outside of it


def part_of(path: list[str]) -> str:
    """Which part of a step an operation belongs to.

    Args:
        path: names from the outermost range to it; vLLM's ranges are "gpu_model_runner: draft" and so on.
    """
    scope = next((name.removeprefix(SCOPE) for name in path if name.startswith(SCOPE)), "")
    if any("attention_with_kv_cache" in name for name in path):
        part = "attention"
    elif any(re.search(r"linear|gemm|mm\b", name) for name in path):
        part = "linear layers"
    else:
        names = {"forward": "rest of the forward pass", "sample": "sampling", "draft": "rest"}
        part = names.get(scope, "rest of the step")
    return f"{DRAFTING}{part}" if scope == "draft" else part


def profile_step(llm: Any, prompts: list[list[int]]) -> tuple[float, dict[str, float]]:
    """Median step in ms without the profiler, and the mean ms of a step's parts with it.

    Args:
        llm: the engine.
        prompts: token ids, in the prefix cache already.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    ids = [
        engine.add_request(f"{index}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
        for index, prompt in enumerate(prompts)
    ]
    decoding: set[str] = set()
    while len(decoding) < len(prompts):
        decoding |= {output.request_id for output in engine.step()}

    def steps_ms() -> list[float]:
        times = []
        for _ in range(STEPS):
            started = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - started))
        return times

    steps_ms()
    step_ms = statistics.median(steps_ms())
    llm.collective_rpc(start_profiler)
    steps_ms()
    num_steps, operations = llm.collective_rpc(stop_profiler)[0]
    engine.abort_request(ids, internal=True)
    parts: dict[str, float] = {}
    for path, ms in operations:
        part = part_of(path)
        parts[part] = parts.get(part, 0.0) + ms / num_steps
    return step_ms, parts


def fit_costs(deployment: Deployment, batch: int, gamma: int, steps: Mapping[str, Any]) -> dict[str, float]:
    """The costs at which the roofline's passes are those of a profile.

    Attention is taken for memory bound in a plain step and compute bound in a verification. The overheads
    are those of draft steps, which are forward passes and little else.

    Args:
        deployment: with efficiencies of 1.
        steps: of `profile_engine`, "plain step" and "round".
    """
    plain, one_round = steps["plain step"], steps["round"]
    parts = one_round["parts_ms"]
    others_ms = sum(parts[f"{DRAFTING}{part}"] for part in ("linear layers", "rest")) / gamma
    overhead_ms = others_ms - max(deployment.linear_ms(batch))
    return {
        "attention_memory_efficiency": plain["attention"]["memory_share"],
        "attention_compute_efficiency": one_round["attention"]["compute_share"],
        "layer_overhead_us": 1e3 * overhead_ms / deployment.shape.num_layers
        - deployment.costs.token_overhead_us * batch,
    }


def profile_engine(args: argparse.Namespace, model: str, deployment: Deployment) -> dict[str, Any]:
    """A plain step and a round of one cell, part by part, and the attention kernel alone beside them."""
    from vllm import LLM

    from vllm_magicdec.planner.profile import fill_prefix_cache, make_prompts

    batch, context, gamma = args.batch, args.context, args.gamma
    settings = {
        "model": model,
        "dtype": args.dtype,
        "block_size": PAGE,
        "max_num_seqs": batch,
        "max_model_len": context + 4 * STEPS * (gamma + 1),
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
    }
    spec = {"method": "magicdec-self", "num_speculative_tokens": gamma, "draft_kv_budget": args.budget}
    with worker_threads():  # before there are engines, whose idle processes poll
        kernel = CpuAttention(deployment.shape, batch * -(-context // PAGE))
        alone = {q: kernel.ms(batch, q, context) for q in range(1, 2 * gamma + 2)}
        del kernel
    steps = {}
    for name, queries, speculation in (("plain step", 1, None), ("round", gamma + 1, spec)):
        llm = LLM(**settings, speculative_config=speculation)
        prompts = make_prompts(llm.llm_engine.model_config.get_vocab_size(), batch, context)
        fill_prefix_cache(llm, prompts)
        step_ms, parts = profile_step(llm, prompts)
        threads = llm.collective_rpc(count_threads)[0]
        llm.llm_engine.engine_core.shutdown()
        steps[name] = {
            "threads": threads,
            "step_ms": step_ms,
            "parts_ms": parts,
            "attention": asdict(Achieved.of(parts["attention"], deployment, batch, queries, context)),
        }
    return {
        "model": args.model,
        "batch": batch,
        "context": context,
        "gamma": gamma,
        "budget": args.budget,
        "steps": steps,
        "costs": {n: float(f"{v:.3g}") for n, v in fit_costs(deployment, batch, gamma, steps).items()},
        "kernel_alone": {
            queries: asdict(Achieved.of(ms, deployment, batch, queries, context))
            for queries, ms in alone.items()
        },
    }


def comparison_table(name: str, comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=f"{name}: ms, ! where the roofline is off by more than {MAX_DIFFERENCE:.0%}")
    costs = comparisons[0].roofline_ms
    for column in ("batch", "context", "time", "measured", *(c for n in costs for c in (n, "ratio", ""))):
        table.add_column(column, justify="right")
    for c in comparisons:
        table.add_row(
            *(str(c.batch), str(c.context), c.time, f"{c.measured_ms:.2f}"),
            *itertools.chain.from_iterable(
                (f"{ms:.2f}", f"{c.measured_ms / ms:.2f}", "!" if differs(c.measured_ms, ms) else "")
                for ms in c.roofline_ms.values()
            ),
        )
    return table


def profile_table(profile: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{profile['model']}, batch {profile['batch']}, context {profile['context']}: ms per step"
    )
    steps = profile["steps"]
    for column in ("", *steps):
        table.add_column(column, justify="right")
    parts = dict.fromkeys(part for step in steps.values() for part in step["parts_ms"])
    for part in parts:
        table.add_row(
            part,
            *(
                f"{ms:.2f} ({ms / sum(step['parts_ms'].values()):.1%})"
                for step in steps.values()
                for ms in (step["parts_ms"].get(part, 0.0),)
            ),
        )
    table.add_row("all of it", *(f"{sum(step['parts_ms'].values()):.2f}" for step in steps.values()))
    table.add_row("without the profiler", *(f"{step['step_ms']:.2f}" for step in steps.values()))
    return table


def achieved_table(profile: Mapping[str, Any]) -> Table:
    table = Table(title="attention: what it makes of the copy bandwidth and the bf16 matmul FLOP/s")
    for column in ("queries", "ms", "GB/s", "of the bandwidth", "GFLOP/s", "of the FLOP/s"):
        table.add_column(column, justify="right")
    rows = [(f"{name}, in the engine", step["attention"]) for name, step in profile["steps"].items()]
    rows += [(f"{queries}, alone", achieved) for queries, achieved in profile["kernel_alone"].items()]
    for name, achieved in rows:
        table.add_row(
            *(name, f"{achieved['ms']:.2f}", f"{achieved['bytes_per_s'] / 1e9:.1f}"),
            *(f"{achieved['memory_share']:.1%}", f"{achieved['flops'] / 1e9:.1f}"),
            f"{achieved['compute_share']:.1%}",
        )
    return table


def shape_of(model: str, dtype: str) -> ModelShape:
    """The shape of what decode.py calls `model`, with weights and K/V of `dtype`."""
    with model_folder(str(TINY_LLAMA) if model == TINY_LLAMA.name else model) as folder:
        shape = find_model(folder)
    return replace(shape, name=model, weight_bytes=ITEM_BYTES[dtype], kv_bytes=ITEM_BYTES[dtype])


def compare_all(
    files: Iterable[Path],
    here: Mapping[str, Any],
    known: dict[str, Deployment],
    measured_costs: Mapping[str, float],
) -> list[dict[str, Any]]:
    """`compare` for every result; if it is of this machine, at the measured costs too."""
    compared = []
    for file in files:
        record = json.loads(file.read_text())
        machine, engine = record["machine"], record["engine"]
        shape = shape_of(engine["model"], engine["dtype"])
        roofline = deployment_of(shape, machine, here, known)
        deployments = {"roofline": roofline}
        if measured_costs and same_machine(machine, here):
            costs = replace(roofline.costs, **measured_costs)
            deployments["at measured costs"] = replace(roofline, costs=costs)
        comparisons = compare(record, deployments)
        console.print(comparison_table(file.name, comparisons))
        compared.append(
            {
                "result": file.name,
                "device": asdict(roofline.hardware),
                "costs": {name: asdict(deployment.costs) for name, deployment in deployments.items()},
                "times": [asdict(comparison) for comparison in comparisons],
            }
        )
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*", help="JSON files of decode.py")
    parser.add_argument("--profile", action="store_true", help="also profile the engine, on a CPU")
    parser.add_argument("--model", default=KV_HEAVY, help="to profile: a folder, a name, or 'kv-heavy'")
    parser.add_argument("--batch", type=int, default=8, help="to profile")
    parser.add_argument("--context", type=int, default=4096, help="to profile, in tokens")
    parser.add_argument("--gamma", type=int, default=8, help="to profile, drafted tokens per round")
    parser.add_argument("--budget", type=int, default=512, help="to profile, in tokens")
    parser.add_argument("--dtype", default="bfloat16", help="to profile")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    if not args.results and not args.profile:
        parser.error("name results of decode.py, or --profile")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
    # The profiler is started and stopped by functions that are sent to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    here = describe_machine()
    if args.profile and "gpu" in here:
        parser.error("--profile is for CPUs; on GPUs benchmarks/gpu times attention kernel by kernel")
    result: dict[str, Any] = {
        "benchmark": "roofline",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": here,
    }
    known: dict[str, Deployment] = {}
    measured_costs: dict[str, float] = {}
    if args.profile:
        deployment = deployment_of(shape_of(args.model, args.dtype), here, here, known)
        with model_folder(args.model) as model:
            result["profile"] = profile = profile_engine(args, model, deployment)
        measured_costs = profile["costs"]
        console.print(profile_table(profile))
        console.print(achieved_table(profile))
        console.print(f"magicdec plan --gpu this --costs '{json.dumps(measured_costs)}'")
    result["comparisons"] = compare_all(args.results, here, known, measured_costs)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
