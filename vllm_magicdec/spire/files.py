# SPDX-License-Identifier: Apache-2.0
"""The files of a draft: weights with a Llama's names, `config.json`, and the model card."""

import json
from pathlib import Path
from typing import Any

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


def make_card(name: str, command: str, log: dict[str, Any]) -> str:
    """Return the model card in Markdown; `log` is the content of `training_log.json`."""
    shape, plan, data = log["draft"], log["plan"], log["data"]
    variant = "as in the paper" if shape["feedback_memory"] else "without feedback memory"
    by_position = ", ".join(f"{share:.3f}" for share in log["held_out_acceptance"])
    rows = [
        ("drafts for", shape["target"]),
        (
            "architecture",
            f"Llama, {shape['num_layers']} layers, initialized with the target's last ones, its embedding "
            f"and unembedding; keys and values are projections of memory vectors ({variant})",
        ),
        ("size", f"{log['num_parameters']:,} parameters, {log['megabytes']:.1f} MB in bfloat16"),
        ("attends to", f"{shape['sinks']} sinks and a window of {shape['window']} tokens"),
        ("data", f"{data['num_tokens']:,} tokens of {', '.join(data['files'])}"),
        (
            "training",
            f"{plan['num_steps']:,} steps of {plan['batch']} x {plan['sequence']:,} tokens, "
            f"{shape['num_draft_steps']} passes, omega {plan['omega']}, "
            f"learning rate {plan['learning_rate']}, seed {plan['seed']}; "
            f"{log['minutes']:.0f} minutes on {log['machine']}",
        ),
        (
            "expected acceptance",
            f"{by_position} (drafts 1 to {shape['num_draft_steps']}, temperature 1, held-out sequences)",
        ),
    ]
    table = "\n".join(f"| {head} | {text} |" for head, text in rows)
    # vLLM would look for a name without a slash on Hugging Face.
    serve = json.dumps({"method": "magicdec", "model": f"./{name}"})
    return (
        f"# {name}\n\nA SPIRe draft (arXiv 2504.06419): a model for speculative decoding that was trained "
        f"from its\ntarget and reads the target's activations. It does not run alone.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        f"Train it with:\n\n```\n{command}\n```\n\n"
        f"Serve it from the parent folder, where TARGET is the path or name of {shape['target']}:\n\n"
        f"```\nvllm serve TARGET --speculative-config '{serve}'\n```\n"
    )
