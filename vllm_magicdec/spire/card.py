# SPDX-License-Identifier: Apache-2.0
"""The model card of a trained draft."""

import json
from typing import Any


def make_card(name: str, command: str, log: dict[str, Any]) -> str:
    """Write the card in Markdown; `log` is the content of `training_log.json`."""
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
