# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, saved by `transformers`.

The weights are chosen so that a wrong view, position or slot changes the output: attention is peaked and
changes the residual as much as the embedding does, and the best logit's margin far exceeds rounding.
"""

import atexit
import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from engines import MODEL
from families import VISION_TOKENS, Family
from torch import nn
from transformers.models.auto import modeling_auto

# Standard deviation of a linear layer's outputs for inputs of about 1, as norms scale them.
GAIN = 2.0
HEAD_GAIN = 4.0  # the same for the output head's logits
# Limits of the image processor: a picture has at most 49 tokens.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 196 * 196


@cache
def _directory() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="models-")
    atexit.register(directory.cleanup)
    return Path(directory.name)


def model_class(family: Family) -> type[nn.Module]:
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family.is_multimodal:
        names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, names[family.model_type])


@cache
def checkpoint(family: Family) -> Path:
    """Return the folder of the family's model, written at the first call and deleted with the process."""
    path = _directory() / family.name.replace(" ", "-").lower()
    config = transformers.AutoConfig.for_model(family.model_type, **family.configuration)
    model = model_class(family)(config)
    fill(model, family)
    model.save_pretrained(path)
    if family.is_multimodal:
        _save_processors(path)
    return path


@torch.no_grad()
def fill(model: nn.Module, family: Family) -> None:
    generator = torch.Generator().manual_seed(family.seed)

    def normal(parameter: torch.Tensor, mean: float, std: float) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    filled: set[torch.Tensor] = set()
    for name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:  # a tied head is the embedding
                continue
            filled.add(parameter)
            if isinstance(module, nn.Embedding):
                normal(parameter, 0.0, family.embedding_std)
            elif own_name == "sinks":
                normal(parameter, 1.0, 1.0)
            elif parameter.dim() == 1 and "Norm" in type(module).__name__ and own_name == "weight":
                normal(parameter, _norm_weight(name, module), 0.2)
            elif parameter.dim() == 1 or own_name.endswith("bias"):
                normal(parameter, 0.0, 0.1)
            else:
                gain = HEAD_GAIN if name in ("lm_head", "embed_out") else GAIN
                normal(parameter, 0.0, gain / math.sqrt(_num_inputs(parameter)))


def _norm_weight(name: str, module: nn.Module) -> float:
    """Return the mean weight of a norm; Gemma's norms add 1 to their weights."""
    is_gemma = type(module).__name__.startswith("Gemma")
    mean = 1.0
    if name.endswith(("q_norm", "k_norm")):
        mean = GAIN  # so that attention is peaked
    elif is_gemma and name == "model.norm":
        mean = 3 * HEAD_GAIN  # the tied head has small weights
    return mean - 1.0 if is_gemma else mean


def _num_inputs(weight: torch.Tensor) -> int:
    """Return inputs per output of weights [outputs, inputs], [outputs, ...] or [experts, ..., inputs]."""
    return weight.shape[-1] if weight.dim() == 3 else weight[0].numel()


def _save_processors(path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"extra_special_tokens": list(VISION_TOKENS)})
    tokenizer.save_pretrained(path)
    sizes: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    for modality, prefix in (("image", ""), ("video", "video_")):
        own = {f"{modality}_processor_type": f"Qwen2VL{modality.capitalize()}Processor"}
        processor = {"processor_class": "Qwen2VLProcessor", **sizes, **own}
        (path / f"{prefix}preprocessor_config.json").write_text(json.dumps(processor))
