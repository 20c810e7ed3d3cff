# SPDX-License-Identifier: Apache-2.0
"""The real engine on a GPU: step times, decode speed, and greedy output that must not change.

Run as `make bench-gpu`, or `python -m benchmarks.gpu.engine` from the root of the project. It needs vLLM
0.32.0 with the plugin. With `--device cpu --small` the same code runs on a tiny model without a GPU. See
README.md beside this file for what the output means.

Every engine is a process of its own. Models have the shapes of known ones and random weights, so acceptance
is *synthetic*: drafts are accepted at stated rates, whatever they are. The last part checks that greedy
output is that of plain decoding, with real acceptance, on the model that ships with the project. The exit
status is 1 if that fails or an engine does.
"""

import argparse
import itertools
import sys
import tempfile
import time
from math import sqrt
from pathlib import Path
from typing import Any

from benchmarks.common.options import add_out, make_parser, settings_of
from benchmarks.common.policies import POLICIES
from benchmarks.common.record import make_record, write
from benchmarks.gpu import engine_report, lossless
from benchmarks.gpu.engine_report import BASE, GOAL_BUDGET, GOAL_CELL, GOAL_GAMMA, GOAL_SHAPE, Result, ok
from benchmarks.gpu.eq2 import paper_rows, this_deployment
from benchmarks.gpu.lossless import engines  # processes with an engine, as in the tests
from benchmarks.gpu.models import SHAPES, SMALL_SHAPE, write_model
from benchmarks.gpu.options import add_device, settle
from vllm_magicdec.planner.performance import tokens_per_round
from vllm_magicdec.planner.profile import tokens_to_grow
from vllm_magicdec.planner.shapes import ModelShape

ALL_SHAPES = {**SHAPES, SMALL_SHAPE.name: SMALL_SHAPE}
PARTS = ("times", "speed", "lossless")
# So that T_select can be told from the rest of a round; as served, snapkv selects once per prompt.
SELECTING_EVERY_ROUND = {policy: {"draft_kv_refresh": 1} for policy in ("snapkv", "snapkv-token")}
PROGRAM = ("-m", "benchmarks.gpu.engine_scenarios")
DAY_S = 24 * 3600

SMALL = {
    "shapes": [SMALL_SHAPE.name],
    "policies": list(POLICIES),
    "batch": [1, 2],
    "context": [256, 1024],
    "budget": 192,
    "max_gamma": 3,
    "gamma": 3,
    "acceptance": [0.8],
    "tours": 1,
    "tokens": 24,
    "turns": 1,
    "lossless_requests": 4,
    "lossless_tokens": 16,
}
WHOLE = {
    "shapes": list(SHAPES),
    "policies": list(POLICIES),
    "budget": GOAL_BUDGET,
    "max_gamma": 8,
    "gamma": GOAL_GAMMA,
    "acceptance": [0.7, 0.8, 0.9, 0.95],
    "tours": 3,
    "tokens": 256,
    "turns": 3,
    "lossless_requests": 16,
    "lossless_tokens": 64,
}


class Engines:
    """Starts engines, one after the other, and returns what they measured.

    Args:
        args: of the command line.
        folder: for models.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder

    def step_times(self, shape: ModelShape, policy: str, backend: str | None) -> list[Result]:
        """The time of every kind of step, cell by cell."""
        args = self._args
        results, run = self._run(
            f"step times: {shape.name}, {policy}, {backend or 'default'} attention",
            ("step_times", {"tours": args.tours}),
            shape,
            {"policy": policy, "asked_backend": backend, "budget": args.budget},
            in_one_process=True,
            async_scheduling=False,
            attention_backend=backend,
            speculative_config={
                **POLICIES[policy],
                **SELECTING_EVERY_ROUND.get(policy, {}),
                "method": "magicdec-self",
                "num_speculative_tokens": "auto",  # lets every step have a number of drafts of its own
                "max_num_speculative_tokens": args.max_gamma,
                "draft_lookup": "off",  # every number of drafts is timed
                "draft_kv_budget": args.budget,
                # No draft is accepted, so that contexts stay what they are while they are measured.
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 1.0,
            },
        )
        if run is not None:
            backends = run.results[0]["attention_backends"]
            results = [{**result, "attention_backends": backends} for result in results]
        return results

    def decode_speed(self, shape: ModelShape, alpha: float | None) -> list[Result]:
        """Tokens per second, cell by cell: plain, or with drafts accepted at a synthetic rate."""
        args = self._args
        known: Result = {"synthetic_acceptance_rate": alpha}
        spec = None
        if alpha is not None:
            known |= {"gamma": args.gamma, "budget": args.budget, "policy": BASE}
            spec = {
                **POLICIES[BASE],
                "method": "magicdec-self",
                "num_speculative_tokens": args.gamma,
                "draft_kv_budget": args.budget,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [alpha**place for place in range(1, args.gamma + 1)],
            }
        results, run = self._run(
            f"decode speed: {shape.name}, {'plain' if spec is None else f'synthetic acceptance {alpha}'}",
            ("decode_speed", {"tokens": args.tokens, "turns": args.turns}),
            shape,
            known,
            # There a stand-in accepts synthetically, and it is in the engine's process.
            in_one_process=args.device == "cpu",
            attention_backend=first_backend(args),
            speculative_config=spec,
        )
        problem = None
        if run is not None and alpha is not None:
            expected = tokens_per_round(args.gamma, alpha)
            problem = wrong_tokens_per_round(run, args.gamma, expected)
        if problem is not None:
            for result in ok(results):
                result |= {"status": "wrong", "reason": problem}
        return results

    def _run(
        self,
        what: str,
        step: tuple[str, dict[str, Any]],
        shape: ModelShape,
        known: Result,
        *,
        in_one_process: bool,
        **engine: Any,
    ) -> tuple[list[Result], engines.EngineRun | None]:
        """A scenario of `engine_scenarios` over all cells of a shape; no run if the engine failed."""
        args = self._args
        cells = cells_of(shape.name, args)
        room = max(tokens_to_grow(args.max_gamma), args.tokens) + args.max_gamma
        write_model(shape, max(context for _, context in cells) + room, self._folder)
        return run_cells(
            what,
            step,
            cells,
            {"shape": shape.name, **known},
            args,
            in_one_process=in_one_process,
            # vLLM captures graphs for numbers of drafts below this number of requests.
            max_num_seqs=max(args.max_gamma + 1, *(batch for batch, _ in cells)),
            **random_model(self._folder),
            **engine,
        )


def random_model(folder: Path) -> dict[str, Any]:
    """Arguments of an engine for what `write_model` wrote."""
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


def run_cells(
    what: str,
    step: tuple[str, dict[str, Any]],
    cells: list[tuple[int, int]],
    known: Result,
    args: argparse.Namespace,
    *,
    in_one_process: bool,
    **engine: Any,
) -> tuple[list[Result], engines.EngineRun | None]:
    """A scenario of `engine_scenarios` over all cells, in an engine of its own.

    Args:
        what: for the progress.
        step: the scenario and its arguments, `cells` apart.
        cells: (batch, context) each.
        known: what every result begins with.
        args: `device`, `small`, `runner`, `dtype` and `page_size` count.
        in_one_process: the engine's core is in the scenario's process.
        engine: arguments of `LLM`; None: vLLM's default.

    Returns:
        A result for each cell, and the run; None if the engine failed.
    """
    scenario, arguments = step
    env = {} if args.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(int(args.runner == "v2"))}
    if in_one_process:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settings = {
        "dtype": args.dtype,
        "block_size": args.page_size,
        "max_model_len": -1,  # as far as the memory goes
        "enforce_eager": args.small,
        **{name: value for name, value in engine.items() if value is not None},
    }
    try:
        run = engines.run(
            [(scenario, {"cells": cells, **arguments})],
            v2=args.runner == "v2",
            env=env,
            own_process=args.device != "cpu",  # whose end frees the device's memory
            time_limit_s=DAY_S,
            program=PROGRAM,
            **settings,
        )
    except RuntimeError as error:
        say(f"{what}: the engine failed\n{error}")
        lost: list[Result] = [{"batch": batch, "context": context} for batch, context in cells]
        return [{**known, **cell, "status": "failed", "reason": str(error)} for cell in lost], None
    say(f"{what}: done")
    used = {"runner": "v2" if run.v2_runner else "v1", "async_scheduling": run.async_scheduling}
    return [{**known, **used, **cell} for cell in run.results[0]["cells"]], run


def wrong_tokens_per_round(run: engines.EngineRun, gamma: int, expected: float) -> str | None:
    """Why the engine's own counters do not show the synthetic tokens per round; None if they do."""
    rounds = run.metrics.get(f"{engines.SPEC_METRIC}drafts", 0)
    if not rounds:
        return "no draft was verified"
    found = 1 + run.accepted / rounds
    # Five standard errors; what a round accepts deviates by half of its range at most.
    if abs(found - expected) <= 5 * (gamma / 2) / sqrt(rounds):
        return None
    return f"{found:.2f} tokens per round instead of {expected:.2f}"


def cells_of(shape: str, args: argparse.Namespace) -> list[tuple[int, int]]:
    """(batch, context) of every cell: what was asked for, or the paper's and the goals'.

    Short contexts come first, and of these large batches: their prompts begin those of the others.
    """
    if args.batch:
        cells = set(itertools.product(args.batch, args.context))
    else:
        # Qwen3-8B is not in the paper; it has the K/V heads of Llama-3.1-8B.
        cells = {(row["batch"], row["context"]) for row in paper_rows(shape) or paper_rows(GOAL_SHAPE)}
        cells |= {GOAL_CELL} if shape == GOAL_SHAPE else set()
    return sorted(cells, key=lambda cell: (cell[1], -cell[0]))


def first_backend(args: argparse.Namespace) -> str | None:
    """The attention backend of all engines but those that compare backends; None: vLLM chooses."""
    return args.attention_backend[0] if args.attention_backend else None


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)

    def choices(*names: str) -> dict[str, Any]:
        return {"nargs": "+", "choices": names, "metavar": "NAME", "help": " | ".join(names)}

    def number(text: str) -> dict[str, Any]:
        return {"type": int, "help": text}

    add_device(parser, small="a tiny model")
    parser.add_argument("--parts", **choices(*PARTS), default=list(PARTS))
    parser.add_argument("--shapes", **choices(*ALL_SHAPES))
    parser.add_argument("--policies", **choices(*POLICIES))
    parser.add_argument("--batch", **number("with --context, instead of the paper's cells"), nargs="+")
    parser.add_argument("--context", **number("tokens per request"), nargs="+")
    parser.add_argument("--budget", **number("tokens that a draft step reads per request"))
    parser.add_argument("--max-gamma", **number("most drafts of a round: every number up to it is timed"))
    parser.add_argument("--gamma", **number("drafts of a round in the decode speed and the table"))
    parser.add_argument("--acceptance", type=float, nargs="+", help="rates at which drafts are accepted")
    parser.add_argument(
        "--attention-backend", nargs="+", metavar="NAME", help="of vLLM; several are compared at verifying"
    )
    parser.add_argument("--runner", choices=("v1", "v2"), help="of vLLM, in the first two parts")
    parser.add_argument("--lossless-modes", **choices(*lossless.MODES))
    parser.add_argument("--lossless-requests", **number("of the last part"))
    parser.add_argument("--lossless-tokens", **number("generated for each of them"))
    parser.add_argument("--dtype", default="bfloat16", help="of the random models")
    parser.add_argument("--page-size", **number("tokens"))
    parser.add_argument("--tours", **number("per cell, each with four of every kind of step"))
    parser.add_argument("--tokens", **number("generated per request for the decode speed"))
    parser.add_argument("--turns", **number("of the decode speed, whose median counts"))
    add_out(parser)
    args = parser.parse_args(argv)
    if bool(args.batch) != bool(args.context):
        parser.error("--batch and --context go together")
    # On a CPU the V2 runner needs Triton's interpreter, and minutes.
    of_cpu = {"lossless_modes": ["v1", "bfloat16-v1"], "page_size": 32}
    of_cuda = {"lossless_modes": ["graphs", "bfloat16-graphs", "v2", "v1"]}
    of_device = of_cuda if args.device == "cuda" else of_cpu
    settle(parser, args, {**(SMALL if args.small else WHOLE), **of_device})
    if not 1 <= args.gamma <= args.max_gamma:
        parser.error(f"--gamma must be between 1 and --max-gamma, {args.max_gamma}")
    if not all(0 < rate <= 1 for rate in args.acceptance):
        parser.error("acceptance rates are above 0 and at most 1")
    return args


def measure(args: argparse.Namespace) -> tuple[list[Result], list[Result], list[Result]]:
    """The results of the three parts; empty where a part was not asked for."""
    times: list[Result] = []
    speed: list[Result] = []
    checks: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="magicdec-") as directory:
        started = Engines(args, Path(directory))
        for shape in (ALL_SHAPES[name] for name in args.shapes):
            if "times" in args.parts:
                for policy in args.policies:
                    times += started.step_times(shape, policy, first_backend(args))
                for backend in (args.attention_backend or [])[1:]:
                    times += started.step_times(shape, BASE, backend)
            if "speed" in args.parts:
                for alpha in (None, *args.acceptance):
                    speed += started.decode_speed(shape, alpha)
    if "lossless" in args.parts:
        for mode in (lossless.MODES[name] for name in args.lossless_modes):
            is_short = args.small and mode.dtype == "bfloat16"
            cases = lossless.SMALL_CASES if is_short else lossless.CASES
            for result in lossless.check(mode, args.lossless_requests, args.lossless_tokens, cases):
                say(f"greedy output, {mode.name}: {result['policy']}: {result['status']}")
                checks.append(result)
    return times, speed, checks


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    times, speed, checks = measure(args)
    # Only now: what this process takes of the device was the engines'.
    record = make_record(
        "gpu engine",
        device=args.device,
        settings=settings_of(args),
        policies=POLICIES,
        acceptance="synthetic in times and speed, the model's own in lossless",
        budgets_differ=lossless.budgets_differ(checks),
        times=times,
        speed=speed,
        lossless=checks,
    )
    gpu = str(record["machine"].get("gpu", "")) if args.device == "cuda" else ""
    deployments = {name: this_deployment(ALL_SHAPES[name], gpu) for name in args.shapes if ok(times)}
    for result in ok(times):
        engine_report.add_predictions(result, deployments[result["shape"]], args.acceptance)
    engine_report.add_speedups(speed, times)
    record["goals"] = engine_report.judge(times, speed, gpu)
    print(engine_report.make_table(record))
    write(record, args.out)
    failed = any(result["status"] in ("wrong", "failed") for result in [*times, *speed, *checks])
    if failed or (checks and not record["budgets_differ"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
