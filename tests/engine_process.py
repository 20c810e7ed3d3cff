# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines one after the other in a process that tests keep; `engines.run` is its client.

A line on standard input names the files of a specification and of the result, and a line on standard
output answers it. Processes are reused because importing vLLM takes longer than starting an engine.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import scenarios
from inside_workers import kernel_library

from vllm_magicdec.errors import MagicDecConfigError


def run_engine(spec: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, run the scenarios and end it; return `engines.EngineRun` without the log."""
    from vllm import LLM

    os.environ["VLLM_MAGICDEC_STRICT"] = "1" if spec["strict"] else "0"
    if os.environ.get("MAGICDEC_TEST_TOKENS_ON_DEVICE"):
        from vllm_magicdec.vllm_api import engine_config

        # As on a GPU.
        engine_config.host_lacks_latest_tokens = lambda config: config.use_v2_model_runner
    llm = LLM(**spec["engine"])
    results = [scenarios.run(llm, step["scenario"], step["arguments"]) for step in spec["steps"]]
    metrics = scenarios.metrics_of(llm)
    config = llm.llm_engine.vllm_config
    run = {
        "results": results,
        "metrics": metrics,
        "num_kv_blocks": config.cache_config.num_gpu_blocks,
        "num_lookahead_tokens": config.num_lookahead_tokens,
        "v2_runner": config.use_v2_model_runner,
        "kernel_libraries": sorted(set(llm.collective_rpc(kernel_library))),
    }
    llm.llm_engine.engine_core.shutdown()
    return run


def _clean_up() -> None:
    """Reset process state, so that engines do not affect later ones."""
    from vllm import logger
    from vllm.distributed import cleanup_dist_env_and_memory

    logger._print_info_once.cache_clear()  # the next one's log has to say everything
    logger._print_warning_once.cache_clear()
    if "recorded_graphs" in sys.modules:
        sys.modules["recorded_graphs"].uninstall()
    gc.collect()
    cleanup_dist_env_and_memory()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until standard input ends or a scenario fails, which leaves the process in an unknown state."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        spec_path, result_path = json.loads(line)
        try:
            run = run_engine(json.loads(Path(spec_path).read_text()))
        except MagicDecConfigError as error:  # a worker's, too: it is in this process
            run = {"refusal": str(error)}
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            print("failed", file=answers, flush=True)
            os._exit(1)
        _clean_up()
        Path(result_path).write_text(json.dumps(run))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
