# SPDX-License-Identifier: Apache-2.0
"""Start or join a Ray cluster, and size the engines for its machine; used by both Ray examples."""

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
OBJECT_STORE_BYTES = 2**29  # for documents on their way to engines; Ray spills more to disk
MIN_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's minimum is 75 MiB
# Logical CPUs of Ray for reading and writing.
HELPER_CPUS = 2
MIN_HELPER_CPUS = 1


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object for argparse."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"seed\": 1}}'")
    return value


def positive(text: str) -> int:
    """Parse a whole number above 0 for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1; write for instance 2")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both examples."""
    parser.add_argument("--model", default=str(TINY_LLAMA), help="folder or name on huggingface.co")
    parser.add_argument(
        "--engine-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="arguments of vLLM's engine; speculative_config null is plain decoding",
    )
    parser.add_argument("--cpus", type=positive, help="CPUs per replica (default: an equal share)")
    parser.add_argument("--address", help="address of a Ray cluster (default: start one on this machine)")


def engine_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `AsyncEngineArgs`: the user's and defaults."""
    defaults: dict[str, Any] = {
        "speculative_config": {"method": "magicdec-self", "num_speculative_tokens": "auto"},
        "per_request_spec_decode_metrics": "summary",  # adds acceptance to each request's result
    }
    if runs_on_cpu():
        # The CPU's page of 128 tokens is coarse for small budgets, and compiling costs more than it saves.
        defaults |= {"block_size": 32, "enforce_eager": True}
    kwargs = {**defaults, **given}
    if not kwargs["speculative_config"]:
        del kwargs["speculative_config"], kwargs["per_request_spec_decode_metrics"]
    return kwargs


def model_source(model: str) -> str:
    """Return the model's name, or its absolute path for processes with another working directory."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def cpus_of_a_replica(replicas: int, given: int | None) -> int:
    """Return the CPUs that Ray reserves for each engine, which are also its number of threads."""
    return given or max(1, len(os.sched_getaffinity(0)) // replicas)


def placement(replicas: int, cpus: int | None) -> dict[str, Any] | None:
    """Return the resources of an engine; None for Ray's own choice of GPUs."""
    # By default Ray would wait for a GPU forever.
    return {"bundles": [{"CPU": cpus_of_a_replica(replicas, cpus)}]} if runs_on_cpu() else None


def environment(model: str, replicas: int) -> dict[str, str]:
    """Return environment variables of every replica's processes."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    if runs_on_cpu():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(min(4, max(1, int(free_gib / 4 / replicas))))
        # Several engines would bind their threads to the same cores; Ray limits their number.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Without binding, a worker needs no separate process, which saves 0.5 GB and starting time.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # The user's variables take precedence. Ray shows them to everyone who sees its jobs: no secrets.
    is_secret = re.compile("KEY|TOKEN|SECRET|PASSWORD").search
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "HF_")) and not is_secret(name)
    }
    return {**variables, **own}


def is_of_ray(error: Exception) -> bool:
    """Return whether an error comes from one of Ray's processes."""
    from ray.exceptions import RayError

    return isinstance(error, RayError)


def reason(error: Exception) -> str:
    """Return the last line of an error of Ray, after the tracebacks, without the class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1]) if lines else type(error).__name__


def connect(address: str | None, replicas: int, cpus: int | None) -> None:
    """Start Ray on this machine until this process ends, or join a cluster.

    Args:
        address: address of the cluster; None to start one.
        replicas: number of engines.
        cpus: CPUs per engine; None for an equal share.

    Raises:
        SystemExit: Ray is not installed, or the cluster cannot be joined.
    """
    if importlib.util.find_spec("ray") is None:
        sys.exit("error: Ray is not installed; try, in the checkout: pip install '.[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise an engine's processes outlive a killed replica.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "1")
    if address is not None and _is_of_this_machine(address):
        _enable_token()  # before Ray reads its variables
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
            _warn_if_waiting(replicas * cpus_of_a_replica(replicas, cpus))
        return
    # Ray Serve needs one more CPU per replica.
    engine_cpus = replicas * (cpus_of_a_replica(replicas, cpus) + 1)
    num_cpus = engine_cpus + HELPER_CPUS if runs_on_cpu() else None
    _start(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=_object_store_bytes(),
    )


def _start(**options: Any) -> None:
    """Start Ray, and try once more if its processes miss their short timeouts."""
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        print(f"Ray did not start: {reason(error)}; trying again ...", file=sys.stderr)
        ray.shutdown()
        ray.init(**options)


def _warn_if_waiting(engine_cpus: int) -> None:
    """Print that too few CPUs are free, because Ray waits for them silently."""
    import ray

    free = ray.available_resources().get("CPU", 0.0)
    if free < engine_cpus + MIN_HELPER_CPUS:
        print(
            f"The cluster has {free:g} free CPUs; the engines need {engine_cpus} and other processes "
            f"{MIN_HELPER_CPUS}. Waiting for them; use a smaller --cpus or --replicas to need fewer.",
            flush=True,
        )


def _is_of_this_machine(address: str) -> bool:
    """Return whether an address is local; other machines do not get this user's token."""
    host = address.rpartition(":")[0]
    if not host:  # "auto": Ray finds the cluster
        return False
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _enable_token() -> None:
    """Enable the user's token, which a local cluster requires."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if "RAY_AUTH_TOKEN" in os.environ or path.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def address_to_join() -> str:
    """Return the `--address` with which others join this cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _object_store_bytes() -> int:
    """Return a size that fits into /dev/shm, or the minimum, for which Ray uses /tmp if necessary."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return max(MIN_OBJECT_STORE_BYTES, min(OBJECT_STORE_BYTES, int(0.6 * free)))
