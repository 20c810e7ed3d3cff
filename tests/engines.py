# SPDX-License-Identifier: Apache-2.0
"""Engines for tests, in processes that are reused; a failing engine's log is in the error."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kernel_libraries
import pytest
import torch

HERE = Path(__file__).parent
MODEL = HERE.parent / "examples" / "tiny-llama"
MODEL_LEN = 8192  # tokens
PAGE = 32  # tokens; the smallest page of vLLM's CPU attention

SPEC_METRIC = "vllm:spec_decode_num_"
FAULT = "VLLM_MAGICDEC_TEST_FAULT"  # see fault_plugin/injected_faults.py

# Arguments of `run` for an engine of two tensor-parallel ranks, a core each.
TENSOR_PARALLEL_2 = {
    "own_process": True,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}
needs_tensor_parallel = pytest.mark.skipif(
    kernel_libraries.best() == "avx2",
    reason="vLLM 0.32.0 is tensor-parallel with its AVX2 kernels neither with speculation nor without",
)
# Fields of a speculative config, by policy.
POLICIES = {
    "streamingllm": {},
    "snapkv": {"draft_kv_policy": "snapkv"},  # by page on a CPU
    "snapkv by token": {"draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    "verify-topk": {"draft_kv_policy": "verify-topk"},
}

# For one engine; the slowest takes a tenth of it on a machine with only AVX2.
TIME_LIMIT_S = 1800
# Triton's `tl.dot`, and with it vLLM's attention in float32 on a GPU, rounds to TF32 (10 bits) by default.
IEEE_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
MAX_PROCESSES = 2  # kept by each worker of pytest-xdist; one takes 0.8 GB
# On a GPU, workers of pytest-xdist share the device. With a given size of the KV cache vLLM does not
# measure free memory, which other engines change meanwhile.
SHARED_GPU = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
ON_GPU = SHARED_GPU if torch.cuda.is_available() else {}


class RefusedError(RuntimeError):
    """The plugin refused the engine's configuration; the message is its sentence."""


@dataclass(frozen=True)
class EngineRun:
    results: list[Any]
    metrics: dict[str, Any]
    num_kv_blocks: int
    num_lookahead_tokens: int
    v2_runner: bool
    kernel_libraries: list[str]  # loaded by its workers; see kernel_libraries.py
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
    return {"method": "magicdec-self", "num_speculative_tokens": num_speculative_tokens, **fields}


def environment(*, v2: bool = False, **extra: str) -> dict[str, str]:
    """Return the environment of an engine's process on this machine."""
    # The name of the running test would give every test its own processes.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    env = {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_MAGICDEC_STRICT": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with functions
        **({"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if (cores := own_cores()) else {}),
        **(kernel_libraries.environment(forced) if (forced := kernel_libraries.forced()) else {}),
        **extra,
    }
    if v2:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if not torch.cuda.is_available():
            env["TRITON_INTERPRET"] = "1"
            # Inductor asks Triton for its device; vLLM compiles Cohere's norms in eager engines, too.
            env["TORCHDYNAMO_DISABLE"] = "1"
    path = [str(HERE / "at_start"), str(HERE)]
    if FAULT in env:
        path.append(str(HERE / "fault_plugin"))
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return env


def own_cores() -> list[int]:
    """Return the cores for engines of this pytest-xdist worker; []: all cores."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    if count == 1 or len(cores) < count:
        return []
    index = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    return cores[index::count]


class EngineProcess:
    """A process that runs engines one after the other; see engine_process.py."""

    def __init__(self, env: Mapping[str, str], cores: Sequence[int] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="engines-")
        self._log = Path(self._directory.name, "log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py")],
                cwd=HERE.parent,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # it ends with all of its children
                preexec_fn=partial(os.sched_setaffinity, 0, cores) if cores else None,
            )

    def run(self, spec: Mapping[str, Any], time_limit_s: float) -> "EngineRun":
        """Run one engine. RefusedError: the plugin refused it. RuntimeError: the process has ended."""
        spec_path, result_path = (Path(self._directory.name, name) for name in ("spec", "result"))
        spec_path.write_text(json.dumps(spec))
        begin = self._log.stat().st_size
        print(json.dumps([str(spec_path), str(result_path)]), file=self._process.stdin, flush=True)
        is_answered, _, _ = select.select([self._process.stdout], [], [], time_limit_s)
        answer = self._process.stdout.readline() if is_answered else f"nothing in {time_limit_s:.0f} s"
        with self._log.open(errors="replace") as log:
            log.seek(begin)
            text = log.read()
        if answer != "done\n":
            status = self.end()
            raise RuntimeError(f"engine: {answer.strip() or status}\n{_telling_part(text)}")
        result = json.loads(result_path.read_text())
        if "refusal" in result:
            raise RefusedError(result["refusal"])
        return EngineRun(**result, log=text)

    def end(self) -> int:
        """End the process and its children; return its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._directory.cleanup()
        return self._process.wait()


_processes: dict[Any, EngineProcess] = {}  # by environment, the most recently used last


def end_processes(keep: int = 0) -> None:
    """End all but the `keep` most recently used processes."""
    while len(_processes) > keep:
        _processes.pop(next(iter(_processes))).end()


atexit.register(end_processes)


def run(
    steps: list[tuple[str, dict[str, Any]]],
    *,
    v2: bool = False,
    strict: bool = True,
    env: Mapping[str, str] | None = None,
    own_process: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    **engine: Any,
) -> EngineRun:
    """Start an engine with arguments of `LLM`, run scenarios of scenarios.py in order, and end it.

    If `strict`, a failure inside drafting raises. With `own_process`, engine core and workers are separate.
    """
    engine = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": MODEL_LEN,
        "block_size": PAGE,
        "enforce_eager": True,
        "disable_log_stats": False,
        **ON_GPU,
        **engine,
    }
    env = {**(IEEE_FLOAT32 if engine["dtype"] == "float32" else {}), **(env or {})}
    scenarios = [{"scenario": name, "arguments": args} for name, args in steps]
    spec = {"engine": engine, "steps": scenarios, "strict": strict}
    if own_process:
        process = EngineProcess(environment(v2=v2, **env))
        try:
            return process.run(spec, time_limit_s)
        finally:
            process.end()
    full = environment(v2=v2, **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env})
    key = frozenset(full.items())
    # vLLM binds only the threads of processes that it starts, and here it starts none.
    process = _processes.pop(key, None) or EngineProcess(full, own_cores())
    _processes[key] = process
    end_processes(keep=MAX_PROCESSES)
    try:
        return process.run(spec, time_limit_s)
    except RefusedError:
        raise
    except BaseException:
        del _processes[key]
        raise


def _telling_part(log: str) -> str:
    """Return the first traceback, which is the worker's and the cause, and the end of the log."""
    first = max(0, log.find("Traceback"))
    return log[first : first + 20_000] + "\n...\n" + log[-2000:]


def run_tests(file: str, *options: str, env: Mapping[str, str] | None = None) -> None:
    """Assert that the tests of a file in attention/ pass in a process with this environment."""
    pytest_alone = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q"]
    child = subprocess.run(
        [*pytest_alone, *options, str(HERE / "attention" / file)],
        cwd=HERE.parent,
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]


def generate(prompts: list[list[int]], sampling: Any, **engine: Any) -> EngineRun:
    """Run an engine with one batch of token-id prompts."""
    return run([("generate", {"batches": [{"prompts": prompts, "sampling": sampling}]})], **engine)


def tokens_of(batch: list[dict[str, Any]]) -> list[list[int]]:
    return [request["completions"][0]["tokens"] for request in batch]


def max_logprob_gap(prompts: list[list[int]], answers: list[dict[str, Any]], **engine: Any) -> float:
    """Return the largest gap, in nats, between generated tokens and the best ones of plain vLLM."""
    answered = zip(prompts, tokens_of(answers), strict=True)
    texts = [{"prompt": prompt, "tokens": tokens} for prompt, tokens in answered]
    scores = run([("score", {"texts": texts})], **engine).results[0]
    return max(best - own for tokens in scores for own, best in tokens)
