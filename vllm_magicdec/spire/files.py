# SPDX-License-Identifier: Apache-2.0
"""Save and load a draft: weights with a Llama's names, and `config.json`."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from vllm_magicdec.spire.model import SpireDraft
from vllm_magicdec.spire.settings import ARCHITECTURE, SpireError, SpireSettings

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


def load(folder: Path, dtype: torch.dtype = torch.float32) -> SpireDraft:
    """Load the draft that `save` wrote.

    Args:
        dtype: dtype of the weights; `memory_logits` stay float32.

    Raises:
        SpireError: the folder holds no draft.
    """
    try:
        fields = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError):
        raise SpireError(f"{folder} is no SPIRe draft; train one with: magicdec train-draft") from None
    settings = SpireSettings.of(fields)
    draft = SpireDraft(LlamaConfig(**{**fields, "dtype": "float32"}), settings)
    missing, unexpected = draft.load_state_dict({n: w.float() for n, w in weights.items()}, strict=False)
    draft.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SpireError(
            f"the weights in {folder} are not a SPIRe draft's; train one with: magicdec train-draft"
        )
    draft.to(dtype)
    if settings.feedback_memory:
        draft.model.memory_logits.data = weights[_MEMORY].float()
    return draft.eval()
