# SPDX-License-Identifier: Apache-2.0
"""Models by name, or by their `config.json`."""

import json
from pathlib import Path

from vllm_magicdec.planner.console import UserError, look_up
from vllm_magicdec.planner.shapes import ModelShape

# Drafts that need no model of their own.
SELF, SPIRE_OF_MODEL = "self", "spire"


def _gemma_3(
    name: str,
    num_layers: int,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    intermediate_size: int,
) -> ModelShape:
    """Every sixth layer sees the whole context."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        vocab_size=262208,
        tied_embeddings=True,
        num_window_layers=num_layers - num_layers // 6,
        window=1024,
    )


def _gpt_oss(name: str, num_layers: int, *, num_experts: int, weight_bytes: float) -> ModelShape:
    """Every second layer sees the whole context; experts are in MXFP4, the rest in bfloat16."""
    return ModelShape(
        *(name, num_layers, 2880, 64, 8, 64, 2880, 201088),
        weight_bytes=weight_bytes,  # size of the checkpoint by its parameters
        num_experts=num_experts,
        num_active_experts=4,
        num_window_layers=num_layers // 2,
        window=128,
    )


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-7b-32k", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, num_experts=128, num_active_experts=8
        ),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True),
        ModelShape("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000),
        # SPIRe's target, whose embeddings that paper leaves out of all counts.
        ModelShape("spire-67m", 8, 512, 8, 8, 128, 4096, 0),
        _gemma_3(
            "gemma-3-12b",
            48,
            hidden_size=3840,
            num_heads=16,
            num_kv_heads=8,
            head_size=256,
            intermediate_size=15360,
        ),
        _gemma_3(
            "gemma-3-27b",
            62,
            hidden_size=5376,
            num_heads=32,
            num_kv_heads=16,
            head_size=128,
            intermediate_size=21504,
        ),
        _gpt_oss("gpt-oss-20b", 24, num_experts=32, weight_bytes=0.66),
        _gpt_oss("gpt-oss-120b", 36, num_experts=128, weight_bytes=0.56),
    )
}


def find_model(name: str) -> ModelShape:
    """The shape behind a directory with a `config.json`, such a file, or a built-in name.

    Raises:
        UserError: there is none.
    """
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
        raise UserError(f"there is no config.json in {name}")
    return look_up(name, MODELS, "model", [*MODELS, "a directory with a config.json"])


def find_draft(name: str, target: ModelShape) -> ModelShape | None:
    """What drafts: a model found as `find_model` does, 'spire' for the draft that SPIRe would make of the
    target, 'self' (None) for the target.

    Raises:
        UserError: there is no such model.
    """
    if name.lower() == SELF:
        return None
    return target.spire_draft() if name.lower() == SPIRE_OF_MODEL else find_model(name)
