# SPDX-License-Identifier: Apache-2.0
"""The servers of a bad day, and what is left of them when they have gone."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from kv_heavy import TINY_LLAMA

from .requests import MAX_MODEL_LEN

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from serving import Server, serve

PAGE = 32  # tokens
# Float32, so that the same sums in another order change next to no answer.
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(PAGE)),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "1024"),
    *("--max-num-seqs", "24", "--scheduling-policy", "priority"),
    *("--served-model-name", "tiny", "--uvicorn-log-level", "warning"),
)
MODEL = "tiny"
_ENVIRONMENT = {
    # A failure of drafting is counted, as it is where people serve; tests set this to 1.
    "VLLM_MAGICDEC_STRICT": "0",
    # The client gives up an idle connection after 5 s; a server that does so too may close one that is just
    # chosen for a request.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # oneDNN keeps a kernel for each number of tokens of a step, a thousand of them, and glibc comes to keep
    # blocks of many megabytes in a heap with holes: for an hour both look like a leak, in plain vLLM, too.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "HF_HUB_OFFLINE": "1",
}
_SHARED_MEMORY = "/dev/shm/"
# What plain vLLM leaves in its folder for temporary files, however it ends: sockets between its processes,
# the file in which ranks find each other, caches of torch and libxsmm. While it serves the plugin makes no
# files, sockets or shared memory (metrics travel with a step's outputs), so it has no name to look for: all
# else counts, such as the `tmp*` that several API servers would share their metrics in.
_FILES_LEFT_BY_VLLM = (
    "????????-????-????-????-????????????",
    "vllm_dist_*",
    "torchinductor_*",
    ".libxsmm.*",
)
# What tensor-parallel ranks on CPUs exchange tensors through: plain vLLM leaves it behind as well where a
# rank is killed.
_LEFT_BY_VLLM = "-cpushm_"


def speculation(**fields: Any) -> list[str]:
    """Options of `vllm serve` for `auto`."""
    config = {"method": "magicdec-self", "num_speculative_tokens": "auto", **fields}
    return ["--speculative-config", json.dumps(config)]


class Footprint:
    """What a server has beside memory of its own: processes, shared memory, files in its folder.

    Args:
        folder: where the server makes its temporary files, and nobody else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: set[psutil.Process] = set()
        self._shared: set[Path] = set()

    def note(self, server: Server) -> None:
        """Add what the server has now."""
        for process in processes_of(server):
            self._processes.add(process)
            with suppress(OSError):  # it has just ended
                maps = Path("/proc", str(process.pid), "maps").read_text()
                paths = (line.partition(_SHARED_MEMORY)[2].strip() for line in maps.splitlines())
                self._shared |= {
                    Path(_SHARED_MEMORY, path) for path in paths if path and _LEFT_BY_VLLM not in path
                }

    @property
    def num_shared(self) -> int:
        """Segments of shared memory that it was seen with."""
        return len(self._shared)

    def left(self) -> list[str]:
        """What of it is still there, but for what plain vLLM leaves as well."""
        processes = [f"process {one.pid}" for one in self._processes if _lives(one)]
        segments = [str(path) for path in sorted(self._shared) if path.exists()]
        files = [path.name for path in sorted(self.folder.iterdir()) if not _is_left_by_vllm(path)]
        return processes + segments + files

    def wait_until_gone(self, timeout_s: float) -> list[str]:
        """What is left when nothing is, or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return left


def _is_left_by_vllm(path: Path) -> bool:
    return any(path.match(pattern) for pattern in _FILES_LEFT_BY_VLLM)


def processes_of(server: Server) -> list[psutil.Process]:
    """All of the server's session, itself among them."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == server.process.pid and _lives(process):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def serve_tiny(
    *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Server, Footprint]]:
    """A server of the shipped model with a folder of its own for temporary files; healthy."""
    with tempfile.TemporaryDirectory(prefix="bad-day-") as folder:
        variables = {**_ENVIRONMENT, "TMPDIR": folder, **environment}
        with serve(str(TINY_LLAMA), *OPTIONS, *options, environment=variables) as server:
            footprint = Footprint(Path(folder))
            footprint.note(server)
            yield server, footprint
