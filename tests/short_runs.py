# SPDX-License-Identifier: Apache-2.0
"""What the tests of the benchmarks' short runs, and those of what becomes of their numbers, agree on."""

# benchmarks/suite.py --quick
REQUESTS, TOKENS = 4, 24
PLOTS = ("throughput-latency.png", "speedup.png", "acceptance.png")
