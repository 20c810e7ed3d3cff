# SPDX-License-Identifier: Apache-2.0
"""What both Ray examples need: a Ray of this machine or another, and engines of a size that fits there."""

import argparse
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from serving import runs_on_cpu

TINY_LLAMA = Path(__file__).resolve().parent / "tiny-llama"
OBJECT_STORE_BYTES = 2**29  # documents on their way to engines; Ray spills what is more to disk
LEAST_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's own is 75 MiB
# CPUs of Ray's own reckoning, for reading and writing beside the engines.
HELPER_CPUS = 2
LEAST_HELPER_CPUS = 1


def json_object(text: str) -> dict[str, Any]:
    """An option that is a JSON object.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"seed\": 1}}'")
    return value


def positive(text: str) -> int:
    """An option that is a whole number from 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1; write for instance 2")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of both examples."""
    parser.add_argument("--model", default=str(TINY_LLAMA), help="folder or name on huggingface.co")
    parser.add_argument(
        "--engine-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="arguments of vLLM's engine, above the defaults; speculative_config null is plain decoding",
    )
    parser.add_argument("--cpus", type=positive, help="of each replica (default, on a CPU: a fair share)")
    parser.add_argument("--address", help="of a Ray cluster; default: a Ray of its own on this machine")


def engine_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`: defaults, and above them what the user gave."""
    defaults: dict[str, Any] = {
        "speculative_config": {"method": "magicdec-self", "num_speculative_tokens": "auto"},
        # What each request's drafts became, in its result.
        "per_request_spec_decode_metrics": "summary",
    }
    if runs_on_cpu():
        # The CPU's page of 128 tokens is coarse for small budgets, and compiling costs more than it saves.
        defaults |= {"block_size": 32, "enforce_eager": True}
    kwargs = {**defaults, **given}
    if not kwargs["speculative_config"]:
        del kwargs["speculative_config"], kwargs["per_request_spec_decode_metrics"]
    return kwargs


def model_source(model: str) -> str:
    """The same for processes with another working directory."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def cpus_of_a_replica(replicas: int, given: int | None) -> int:
    """CPUs that Ray sets aside for each engine; it also makes that many threads compute."""
    return given or max(1, len(os.sched_getaffinity(0)) // replicas)


def placement(replicas: int, cpus: int | None) -> dict[str, Any] | None:
    """What Ray has to find free for an engine; None: GPUs, as Ray itself reckons."""
    # Else Ray waits for a GPU, for ever.
    return {"bundles": [{"CPU": cpus_of_a_replica(replicas, cpus)}]} if runs_on_cpu() else None


def environment(model: str, replicas: int) -> dict[str, str]:
    """Variables of every replica's processes."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    if runs_on_cpu():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(min(4, max(1, int(free_gib / 4 / replicas))))
        # Several engines would all bind their threads to the same cores; Ray limits their number.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A worker has a process of its own on CPUs so that its threads can be bound: without, an engine
        # starts sooner and takes 0.5 GB less. Ray Serve asks for that process all the same.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # The user's own come first. Ray shows these to whoever sees its jobs: no secrets.
    is_secret = re.compile("KEY|TOKEN|SECRET|PASSWORD").search
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "HF_")) and not is_secret(name)
    }
    return {**variables, **own}


def is_of_ray(error: Exception) -> bool:
    """Whether it happened in one of Ray's processes, such as an engine that could not start."""
    from ray.exceptions import RayError

    return isinstance(error, RayError)


def reason(error: Exception) -> str:
    """What such an error says last, after the tracebacks of those processes, without its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else type(error).__name__


def connect(address: str | None, replicas: int, cpus: int | None) -> None:
    """Start a Ray on this machine, which ends with this process, or join a cluster.

    Raises:
        SystemExit: Ray is not installed, or the cluster cannot be joined.
    """
    if importlib.util.find_spec("ray") is None:
        sys.exit("error: Ray is not installed; try, in the checkout: pip install '.[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # An engine's processes would outlive a replica that is killed.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "1")
    if address is not None and _is_of_this_machine(address):
        _bring_token()  # before Ray reads its variables
    import ray
    from ray.exceptions import AuthenticationError

    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, AuthenticationError) as error:
            sys.exit(
                f"error: {error}; is it running, and does this user have its token (RAY_AUTH_MODE=token, "
                "with RAY_AUTH_TOKEN or ~/.ray/auth_token)?"
            )
        if runs_on_cpu():
            _say_if_it_waits(replicas * cpus_of_a_replica(replicas, cpus))
        return
    # Of Ray Serve each replica takes one more.
    of_engines = replicas * (cpus_of_a_replica(replicas, cpus) + 1)
    num_cpus = of_engines + HELPER_CPUS if runs_on_cpu() else None
    _start(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=_object_store_bytes(),
    )


def _start(**options: Any) -> None:
    """Start a Ray; once more if it fails, as it gives its processes no more than some seconds."""
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        print(f"Ray did not start: {reason(error)}; once more ...", file=sys.stderr)
        ray.shutdown()
        ray.init(**options)


def _say_if_it_waits(wanted: int) -> None:
    """Ray would wait for CPUs without a word, for ever where others keep them."""
    import ray

    free = ray.available_resources().get("CPU", 0.0)
    if free < wanted + LEAST_HELPER_CPUS:
        print(
            f"The cluster has {free:g} CPUs free now. The engines want {wanted}, and what is beside them "
            f"{LEAST_HELPER_CPUS}; this waits until there are as many. Fewer: --cpus, --replicas",
            flush=True,
        )


def _is_of_this_machine(address: str) -> bool:
    """No other gets this user's token unasked."""
    host = address.rpartition(":")[0]
    if not host:  # "auto": Ray finds the cluster itself
        return False
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _bring_token() -> None:
    """A Ray of one machine wants its user's token, which Ray brings only to those that it finds itself."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if "RAY_AUTH_TOKEN" in os.environ or path.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def address_to_join() -> str:
    """What others give as `--address` to join this Ray."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _object_store_bytes() -> int:
    """What fits into /dev/shm, which is 64 MiB in many containers; below Ray's least it takes /tmp."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return max(LEAST_OBJECT_STORE_BYTES, min(OBJECT_STORE_BYTES, int(0.6 * free)))
