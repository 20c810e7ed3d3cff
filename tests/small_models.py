# SPDX-License-Identifier: Apache-2.0
"""Configurations of small models; configuring an engine needs no weights."""

from pathlib import Path

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def write_llama(path: Path, **fields) -> str:
    from transformers import LlamaConfig

    given = {**SIZES, "num_hidden_layers": 2, **fields}
    LlamaConfig(architectures=["LlamaForCausalLM"], **given).save_pretrained(path)
    return str(path)
