# SPDX-License-Identifier: Apache-2.0
"""Scripts of benchmarks/ and examples/ can be imported."""

import sys

import engines

sys.path[:0] = [str(engines.HERE.parent / name) for name in ("benchmarks", "examples")]
