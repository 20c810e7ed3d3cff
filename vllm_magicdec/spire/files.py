# SPDX-License-Identifier: Apache-2.0
"""The files of a draft: weights with a Llama's names, and `config.json`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_magicdec.spire.model import SpireDraft
from vllm_magicdec.spire.settings import ARCHITECTURE

_MEMORY = "model.memory_logits"  # stored in float32


def save(draft: SpireDraft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights and `config.json`."""
    weights = {}
    for name, weight in draft.state_dict().items():
        if name == "lm_head.weight" and draft.config.tie_word_embeddings:
            continue
        stored = torch.float32 if name == _MEMORY else dtype
        weights[name] = weight.detach().to("cpu", stored).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by the owner only
    fields = draft.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "use_cache"):
        fields.pop(name, None)
    fields |= {"architectures": [ARCHITECTURE], "dtype": str(dtype).removeprefix("torch.")}
    fields |= draft.settings.config_fields()
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
