# SPDX-License-Identifier: Apache-2.0
"""What a process of the tests does before anything else, where its environment asks for it."""

import os
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton_on_cpu  # noqa: F401

if name := os.environ.get("MAGICDEC_TEST_KERNELS"):
    sys.path.append(str(Path(__file__).parents[1]))
    import kernel_libraries

    kernel_libraries.force(name)

if "MAGICDEC_TEST_TORCHVISION" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    import torchvision_for_tests

    torchvision_for_tests.make_importable()
