# SPDX-License-Identifier: Apache-2.0
"""torchvision for multimodal engines on machines whose torch is a CPU build.

vLLM's Qwen-VL imports it. The registry has only a CUDA build, which does not load beside torch's CPU build
and breaks `import transformers`, so `make venv` puts it into a separate folder. Its image functions are
plain torch and need no compiled code.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

VARIABLE = "MAGICDEC_TEST_TORCHVISION"  # its folder, for processes that are to have it
FOLDER = Path(sys.prefix, "torchvision")

_operators = torch.library.Library("torchvision", "FRAGMENT")  # they go when it does


def environment() -> dict[str, str]:
    """Return the variables with which a process can import it; FileNotFoundError: it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER} is missing; run 'make venv'")
    return {VARIABLE: str(FOLDER)}


def make_importable() -> None:
    """Add it to `sys.path` in a process with the variables of `environment`."""
    sys.path.append(os.environ[VARIABLE])
    # Without its compiled part, torchvision fails where it describes two operators.
    for name in ("nms", "qnms"):
        _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
