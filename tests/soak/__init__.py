# SPDX-License-Identifier: Apache-2.0
"""A server with `auto` under traffic, bad input, injected faults and kills: `python -m soak --help`."""
