# SPDX-License-Identifier: Apache-2.0
"""torchvision for engines that look at pictures, on machines whose torch is a CPU build.

vLLM's Qwen-VL imports it. The registry has it as a CUDA build, which does not load beside torch's CPU build
and then breaks `import transformers`, so `make venv` puts it into a folder of its own; its functions on
pictures are plain torch and need nothing compiled.
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
    """What a process needs to have it.

    Raises:
        FileNotFoundError: it was not installed.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER} is missing; run 'make venv'")
    return {VARIABLE: str(FOLDER)}


def make_importable() -> None:
    """In a process that `environment` was meant for, before anything imports it."""
    sys.path.append(os.environ[VARIABLE])
    # Without its compiled part, torchvision fails where it describes two operators.
    for name in ("nms", "qnms"):
        _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
