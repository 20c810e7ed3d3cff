# SPDX-License-Identifier: Apache-2.0
"""Model shapes by name or from a `config.json`."""

import json
from pathlib import Path
from typing import Any

from vllm_magicdec.planner.console import UserError, find_by_name
from vllm_magicdec.planner.shapes import ModelShape

# Drafts that need no model of their own.
SELF, SPIRE_OF_MODEL = "self", "spire"


# Layers without a window: every sixth of Gemma 3, every second of gpt-oss.
_GEMMA_3: dict[str, Any] = {"tied_embeddings": True, "window": 1024}
_GPT_OSS: dict[str, Any] = {"num_active_experts": 4, "window": 128}

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-7b-32k", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("llama-3.3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, num_experts=128, num_active_experts=8
        ),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True),
        ModelShape("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000),
        # SPIRe's target, without embeddings, as that paper counts.
        ModelShape("spire-67m", 8, 512, 8, 8, 128, 4096, 0),
        ModelShape("gemma-3-12b", 48, 3840, 16, 8, 256, 15360, 262208, num_window_layers=40, **_GEMMA_3),
        ModelShape("gemma-3-27b", 62, 5376, 32, 16, 128, 21504, 262208, num_window_layers=52, **_GEMMA_3),
        # Experts are in MXFP4, the rest in bfloat16: the size of the checkpoint divided by its parameters.
        ModelShape(
            *("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, 0.66),
            num_experts=32,
            num_window_layers=12,
            **_GPT_OSS,
        ),
        ModelShape(
            *("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, 0.56),
            num_experts=128,
            num_window_layers=18,
            **_GPT_OSS,
        ),
    )
}


def find_model(name: str) -> ModelShape:
    """Return the shape of a folder with a `config.json`, such a file, or a name, or raise UserError."""
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_text())
        except ValueError:
            raise UserError(f"{file}: it is not JSON; name a model's config.json") from None
        try:
            return ModelShape.from_config(config, name=file.resolve().parent.name)
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None
    if path.is_dir():
        raise UserError(f"there is no config.json in {name}; name a folder that has one")
    return find_by_name(name, MODELS, "model", [*MODELS, "a directory with a config.json"])


def find_draft(name: str, target: ModelShape) -> ModelShape | None:
    """Return the target's SPIRe draft for 'spire', None for 'self', and else the model of that name."""
    if name.lower() == SELF:
        return None
    return target.spire_draft() if name.lower() == SPIRE_OF_MODEL else find_model(name)
