# SPDX-License-Identifier: Apache-2.0
"""Options that both layers have: the device, and whether everything is small."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch


def add_device(parser: argparse.ArgumentParser, small: str) -> None:
    """The options; `small` says what is small."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help=f"{small}: does it all run?")


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Give what the user has not set a value, and refuse a device that will not do."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device == "cpu" and not args.small:
        parser.error("on a CPU everything is slow: use --device cpu --small")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; use --device cpu --small to see that it runs")
