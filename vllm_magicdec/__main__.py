# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_magicdec` is the command `magicdec`."""

import sys

from vllm_magicdec.planner.console import main

sys.exit(main())
