# SPDX-License-Identifier: Apache-2.0
"""Write a result as a JSON file."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .machine import describe_machine, vllm_environment


def make_record(benchmark: str, **fields: Any) -> dict[str, Any]:
    """Start a record with benchmark, date and machine; call it before the measurement."""
    today = datetime.now(UTC).date().isoformat()
    return {"benchmark": benchmark, "date": today, "machine": describe_machine(), **fields}


def engine_record(benchmark: str, model: str, settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Start a record of vLLM engines in this process.

    Args:
        benchmark: name of the benchmark.
        model: the model as the user named it.
        settings: result of `engine_settings`, with the folder of the model.
        fields: other fields of the record.
    """
    engine = {**settings, "model": Path(model).name}
    return make_record(benchmark, environment=vllm_environment(), engine=engine, **fields)


def write(record: dict[str, Any], path: Path | None) -> None:
    """Write a record and print its path; without a path, do nothing."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")
