# SPDX-License-Identifier: Apache-2.0
"""For roofline.py: where a step's time goes on a CPU, and what attention makes of the machine."""

import argparse
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.clock import seconds
from common.decoding import Batch
from common.engines import PAGE, engine, engine_settings
from common.tables import make_table
from rich.table import Table

from vllm_magicdec.planner.hardware import worker_threads
from vllm_magicdec.planner.performance import Deployment
from vllm_magicdec.planner.profile import fill_prefix_cache, make_prompts
from vllm_magicdec.planner.shapes import ModelShape

SCOPE = "gpu_model_runner: "  # vLLM's names for the parts of a step begin with it
DRAFTING = "drafting: "
REPEATS = 5
STEPS = 8  # that are profiled, and as many that are timed without the profiler


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

        def run() -> None:
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

        run()
        return 1e3 * statistics.median(seconds(run) for _ in range(REPEATS))


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
    batch = Batch(llm, prompts, max_tokens=None)

    def steps_ms() -> list[float]:
        return [1e3 * seconds(batch.step) for _ in range(STEPS)]

    steps_ms()
    step_ms = statistics.median(steps_ms())
    llm.collective_rpc(start_profiler)
    steps_ms()
    num_steps, operations = llm.collective_rpc(stop_profiler)[0]
    batch.abort()
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
    batch, context, gamma = args.batch, args.context, args.gamma
    model_len = context + 4 * STEPS * (gamma + 1)
    settings = engine_settings(model, args.dtype, batch=batch, model_len=model_len)
    spec = {"method": "magicdec-self", "num_speculative_tokens": gamma, "draft_kv_budget": args.budget}
    with worker_threads():  # before there are engines, whose idle processes poll
        kernel = CpuAttention(deployment.shape, batch * -(-context // PAGE))
        alone = {q: kernel.ms(batch, q, context) for q in range(1, 2 * gamma + 2)}
        del kernel
    steps = {}
    for name, queries, speculation in (("plain step", 1, None), ("round", gamma + 1, spec)):
        with engine(settings, speculation) as llm:
            prompts = make_prompts(llm.llm_engine.model_config.get_vocab_size(), batch, context)
            fill_prefix_cache(llm, prompts)
            step_ms, parts = profile_step(llm, prompts)
            threads = llm.collective_rpc(count_threads)[0]
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


def profile_table(profile: Mapping[str, Any]) -> Table:
    steps = profile["steps"]
    title = f"{profile['model']}, batch {profile['batch']}, context {profile['context']}: ms per step"
    table = make_table(title, ("", *steps))
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
    table = make_table(
        "attention: what it makes of the copy bandwidth and the bf16 matmul FLOP/s",
        ("queries", "ms", "GB/s", "of the bandwidth", "GFLOP/s", "of the FLOP/s"),
    )
    rows = [(f"{name}, in the engine", step["attention"]) for name, step in profile["steps"].items()]
    rows += [(f"{queries}, alone", achieved) for queries, achieved in profile["kernel_alone"].items()]
    for name, achieved in rows:
        table.add_row(
            *(name, f"{achieved['ms']:.2f}", f"{achieved['bytes_per_s'] / 1e9:.1f}"),
            *(f"{achieved['memory_share']:.1%}", f"{achieved['flops'] / 1e9:.1f}"),
            f"{achieved['compute_share']:.1%}",
        )
    return table
