# SPDX-License-Identifier: Apache-2.0
"""Targets with random weights, small enough to train a draft in a second."""

from pathlib import Path

import torch
from texts import MODEL
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def write_target(folder: Path, **fields) -> str:
    """Write a Llama of 4 layers with the shipped model's tokenizer, and return its folder."""
    torch.manual_seed(1)
    shape = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    others = dict(max_position_embeddings=512, initializer_range=0.2, rope_theta=1000.0)
    config = LlamaConfig(**shape, **heads, **others, bos_token_id=0, eos_token_id=1, **fields)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return str(folder)
