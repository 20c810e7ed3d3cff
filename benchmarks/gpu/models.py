# SPDX-License-Identifier: Apache-2.0
"""What the engines are given: models of known shapes with random weights."""

import json
from pathlib import Path

from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.shapes import ModelShape

SHAPES = {name: MODELS[name] for name in ("llama-3.1-8b", "llama-2-7b", "qwen3-8b")}
# Small enough for a CPU.
SMALL_SHAPE = ModelShape("small llama", 2, 256, 4, 2, 64, 512, 1024)


def write_model(shape: ModelShape, max_context: int, folder: Path) -> None:
    """Write the shape's `config.json`, which is all that vLLM's `load_format=dummy` reads.

    Args:
        shape: of the model.
        max_context: tokens.
        folder: where to.
    """
    is_qwen = shape.name.startswith("qwen3")
    config = {
        "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_qwen else "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
