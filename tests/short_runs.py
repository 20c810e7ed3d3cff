# SPDX-License-Identifier: Apache-2.0
"""Constants shared by tests of the benchmarks' short runs and of their tables and plots."""

# benchmarks/suite.py --quick
REQUESTS, TOKENS = 4, 24
PLOTS = ("throughput-latency.png", "speedup.png", "acceptance.png")
