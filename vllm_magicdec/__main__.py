# SPDX-License-Identifier: Apache-2.0
"""Run the command `magicdec` as `python -m vllm_magicdec`."""

import sys

from vllm_magicdec.planner.console import main

sys.exit(main())
