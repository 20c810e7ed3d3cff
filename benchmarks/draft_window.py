# SPDX-License-Identifier: Apache-2.0
"""Compare drafts of vLLM's own methods over their whole KV cache and over a window: see --help.

The target is the shipped model. `draft_model` is a small model (tiny-draft), `eagle3` a head that this
script trains on the standard library and writes to --head, or finds there. All engines run at the same time
and take turns on every context length; the texts are in the prefix cache. Results are medians over the
turns; speeds are ratios to the same method over its whole cache in the same turn.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.decoding import decode_job, medians
from common.documents import encode, prompts_of_cells
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.options import add_documents, add_out, make_parser, settings_of
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA
from rich.table import Table
from safetensors.torch import save_file
from suite import TINY_DRAFT
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from vllm_magicdec.planner.profile import fill_prefix_cache
from vllm_magicdec.spire.target import Target

sys.path.insert(0, str(TINY_LLAMA))
from train import read_library

AUX_LAYERS = (1, 3, 5)  # blocks after which the head takes the target's residual stream
SEQUENCE, BATCH = 1024, 2  # tokens, sequences per step
PASSES = 2  # of the head over a sequence; the second continues the first


class Eagle3Head(nn.Module):
    """The layer of an EAGLE-3 head (Li et al. 2025), as vLLM's `LlamaForCausalLMEagle3` computes it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        hidden = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * hidden, outputs, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return the residual stream, `[batch, length, hidden_size]` as both inputs."""
        layer, length = self.midlayer, hidden.shape[1]
        inputs = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        mask = hidden.new_full((length, length), float("-inf")).triu(1)
        attended, _ = layer.self_attn(
            inputs, position_embeddings=self.rotary(hidden, torch.arange(length)[None]), attention_mask=mask
        )
        hidden = hidden + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def sequences(seed: int) -> Iterator[Tensor]:
    """Yield batches of random excerpts of the library's modules, `[BATCH, SEQUENCE]` token ids."""
    tokenizer, rng = AutoTokenizer.from_pretrained(TINY_LLAMA), np.random.default_rng(seed)
    modules = ["".join(lines) for lines in read_library()[0]]
    rng.shuffle(modules)
    tokens = np.array(encode(tokenizer, "\n".join(modules)[: 2**22]))
    while True:
        starts = rng.integers(len(tokens) - SEQUENCE, size=BATCH)
        yield torch.from_numpy(np.stack([tokens[start : start + SEQUENCE] for start in starts]))


def train_head(folder: Path, num_steps: int) -> None:
    """Train a head for the shipped model and write it to `folder`."""
    target = Target(str(TINY_LLAMA), torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    head, embed = Eagle3Head(target.config), target.model.model.embed_tokens
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=num_steps)
    for step, tokens in zip(range(num_steps), sequences(seed=1), strict=False):
        activations, logits = target.run(tokens, AUX_LAYERS)
        hidden, losses = head.fc(activations.flatten(2)), []
        for shift in range(1, PASSES + 1):
            # Of a token and the hidden state of the token before it, the head predicts the next token.
            hidden = head(embed(tokens[:, shift:]), hidden[:, :-1])
            draft = target.model.lm_head(head.norm(hidden))
            losses.append(
                nn.functional.cross_entropy(draft.flatten(0, 1), logits[:, shift:].argmax(-1).flatten())
            )
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == num_steps - 1:
            console.print(f"step {step}: losses " + ", ".join(f"{each.item():.3f}" for each in losses))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.contiguous() for name, value in head.state_dict().items() if "rotary" not in name
    }
    weights["lm_head.weight"] = target.model.lm_head.weight.detach().clone()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((TINY_LLAMA / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "dtype": "float32",
        "draft_vocab_size": target.config.vocab_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return speculative configurations by name, those over the whole cache first."""
    methods = {
        "draft_model": {"method": "draft_model", "model": str(TINY_DRAFT)},
        "eagle3": {"method": "eagle3", "model": str(args.head)},
    }
    number = {"num_speculative_tokens": args.gamma}
    whole = {name: {**spec, **number} for name, spec in methods.items()}
    return whole | {
        window_of(name): {**spec, "draft_kv_budget": args.budget} for name, spec in whole.items()
    }


def window_of(name: str) -> str:
    return f"{name}, window"


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of a row per context length and method."""
    columns = ["tokens per round", "with the window", "speed with the window"]
    table = make_table("the shipped model", columns, ["context", "method"])
    for record in records:
        for context, results in record["results"].items():
            for name in filter(lambda name: window_of(name) in results, results):
                whole, window = results[name], results[window_of(name)]
                lengths = (f"{each['acceptance_length']:.2f}" for each in (whole, window))
                table.add_row(f"{int(context):,}", name, *lengths, f"{window['speed']:.2f}")
    return table


def run(args: argparse.Namespace) -> None:
    if not (args.head / "model.safetensors").exists():
        train_head(args.head, args.steps)
    settings = engine_settings(
        str(TINY_LLAMA), "float32", batch=args.batch, model_len=max(args.context) + args.tokens + 2 * PAGE
    )
    chosen = contenders(args)
    record = engine_record("draft_window", "tiny-llama", settings, options=settings_of(args, "head"))
    record |= {"results": {}}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(settings, spec)) for name, spec in chosen.items()}
        turn, tokenizer = Turn(), AutoTokenizer.from_pretrained(TINY_LLAMA)
        for prompts in prompts_of_cells(tokenizer, [args.batch], args.context, args.documents):
            for llm in engines.values():
                fill_prefix_cache(turn.of(llm), prompts)
            jobs = {
                name: lambda llm=llm, prompts=prompts: decode_job(turn.of(llm), prompts, args.tokens)
                for name, llm in engines.items()
            }
            turns = take_turns(jobs, args.turns)
            results = {}
            for name, own in turns.items():
                whole = turns[name.removesuffix(window_of(""))]
                pairs = zip(own, whole, strict=True)
                speed = statistics.median(o.tokens_per_s / w.tokens_per_s for o, w in pairs)
                results[name] = {**asdict(medians(own)), "speed": speed}
            record["results"][str(len(prompts[0]))] = results
            write(record, args.out)
            console.print(table_of([record]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--head", type=Path, default=Path("build/eagle3-head"), help="folder: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="of the head's training: %(default)s")
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="generated per request")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--budget", type=float, default=512)
    parser.add_argument("--turns", type=int, default=3, help="per engine and context length")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    set_environment(kv_cache_gib=2)
    run(args)


if __name__ == "__main__":
    main()
