# SPDX-License-Identifier: Apache-2.0
"""A result as a JSON file."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .machine import describe_machine, vllm_environment


def make_record(benchmark: str, **fields: Any) -> dict[str, Any]:
    """Which benchmark, when, on what machine, and what else is known before anything is measured."""
    today = datetime.now(UTC).date().isoformat()
    return {"benchmark": benchmark, "date": today, "machine": describe_machine(), **fields}


def engine_record(benchmark: str, model: str, settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """`make_record` for vLLM engines in this process.

    Args:
        model: as the user named it; `settings` has the folder that was loaded.
        settings: of `engine_settings`.
    """
    engine = {**settings, "model": Path(model).name}
    return make_record(benchmark, environment=vllm_environment(), engine=engine, **fields)


def write(record: dict[str, Any], path: Path | None) -> None:
    """Write a record and say so; without a path, do nothing."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")
