# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: each run is a process; its log is shown when it fails."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
MODEL = HERE.parent / "examples" / "tiny-llama"
MODEL_LEN = 8192  # tokens
PAGE = 32  # tokens; the smallest page of vLLM's CPU attention

SPEC_METRIC = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class EngineRun:
    """What one engine process returned."""

    results: list[Any]
    metrics: dict[str, Any]
    num_kv_blocks: int
    num_lookahead_tokens: int
    async_scheduling: bool
    v2_runner: bool
    log: str

    @property
    def drafted(self) -> int:
        return self.metrics.get(SPEC_METRIC + "draft_tokens", 0)

    @property
    def accepted(self) -> int:
        return self.metrics.get(SPEC_METRIC + "accepted_tokens", 0)

    @property
    def draft_failures(self) -> int:
        return self.metrics["vllm:magicdec_draft_failures"]

    @property
    def preemptions(self) -> int:
        return self.metrics["vllm:num_preemptions"]


def magicdec(num_speculative_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A speculative config for the method under test."""
    return {"method": "magicdec-self", "num_speculative_tokens": num_speculative_tokens, **fields}


def environment(*, v2: bool = False, strict: bool = True, **extra: str) -> dict[str, str]:
    """The environment of an engine process on this machine."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_MAGICDEC_STRICT": "1" if strict else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with functions
        **_cores_of_this_worker(),
        **extra,
    }
    path = [str(HERE)]
    if v2:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if not torch.cuda.is_available():
            env["TRITON_INTERPRET"] = "1"
            path.insert(0, str(HERE / "triton_interpreter"))
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return env


def _cores_of_this_worker() -> dict[str, str]:
    """Tests that run side by side (pytest-xdist) keep their engines on cores of their own."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    if count == 1 or len(cores) < count:
        return {}
    index = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[index::count]))}


def run(
    steps: list[tuple[str, dict[str, Any]]],
    *,
    v2: bool = False,
    strict: bool = True,
    env: dict[str, str] | None = None,
    timeout_s: int = 600,
    program: Sequence[str] = (str(HERE / "engine_process.py"),),
    **engine: Any,
) -> EngineRun:
    """Start an engine, run the scenarios of `program` in order, and return what they returned."""
    engine = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": MODEL_LEN,
        "block_size": PAGE,
        "enforce_eager": True,
        "disable_log_stats": False,
        **engine,
    }
    spec = {"engine": engine, "steps": [{"scenario": name, "arguments": args} for name, args in steps]}
    with tempfile.TemporaryDirectory(prefix="engine-") as directory:
        spec_path, result_path = Path(directory, "spec.json"), Path(directory, "result.json")
        spec_path.write_text(json.dumps(spec))
        process = subprocess.run(
            [sys.executable, *program, str(spec_path), str(result_path)],
            cwd=HERE.parent,
            env=environment(v2=v2, strict=strict, **(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if process.returncode != 0 or not result_path.exists():
            raise RuntimeError(f"engine ended with {process.returncode}:\n{_telling_part(process.stdout)}")
        return EngineRun(**json.loads(result_path.read_text()), log=process.stdout)


def _telling_part(log: str) -> str:
    """The first trace, which is the worker's and the cause, and the end of the log."""
    first = max(0, log.find("Traceback"))
    return log[first : first + 8000] + "\n...\n" + log[-2000:]


def generate(prompts: list[list[int]], sampling: Any, **engine: Any) -> EngineRun:
    """One batch of token-id prompts."""
    return run([("generate", {"batches": [{"prompts": prompts, "sampling": sampling}]})], **engine)


def tokens_of(batch: list[dict[str, Any]]) -> list[list[int]]:
    """The first completion's tokens of every request of a batch."""
    return [request["completions"][0]["tokens"] for request in batch]
