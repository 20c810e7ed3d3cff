# SPDX-License-Identifier: Apache-2.0
"""A copy of the shipped model whose KV cache weighs as much as a large model's, and that says the same.

The shipped model keeps 3 KiB of K/V per token (bfloat16); a long context of it is quickly read. The copy
computes the same function with eight KV heads, as multi-head attention, and eight layers: 16 KiB per token,
against 5 million weights. So acceptance lengths stay those of a trained model, and a decode step takes
little longer than reading the KV cache, as at the long contexts and large batches magicdec is for.

- Every query head gets a KV head of its own, a copy of its group's.
- Every head is there twice, each with half of the output weight (exact in bfloat16).
- Layers are added, up to eight, whose output projections are zero: they read their KV cache and add
  nothing.

Of the hybrid sibling (tiny-hybrid), half of whose four layers have a window, there are copies with 2, 4 and
6 layers of eight that see the whole context, by the kind of the added ones: the same function at another
cost.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KV_HEAVY = "kv-heavy"
KV_HEAVY_HYBRIDS = {f"kv-heavy-{number}-full": number for number in (2, 4, 6)}
TINY_LLAMA = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
TINY_HYBRID = Path(__file__).resolve().parent / "tiny-hybrid"
NUM_LAYERS = 8
COPIES = 2  # of every head


def write_kv_heavy(source: Path, target: Path, num_full: int = NUM_LAYERS) -> None:
    """Write the copy of the model in `source` to `target`, with its tokenizer.

    Args:
        num_full: layers of the copy that see the whole context; a Llama's all do.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = model.config
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    added = NUM_LAYERS - len(kinds)
    num_added_full = num_full - kinds.count("full_attention")
    if not 0 <= num_added_full <= added:
        raise ValueError(f"no copy of {source} has {num_full} layers of {NUM_LAYERS} that see everything")
    kinds += ["full_attention"] * num_added_full + ["sliding_attention"] * (added - num_added_full)
    heads, size, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    group = heads // config.num_key_value_heads
    wide = type(model)(
        type(config)(
            **{
                **config.to_dict(),
                "num_hidden_layers": NUM_LAYERS,
                "layer_types": kinds,
                "num_attention_heads": heads * COPIES,
                "num_key_value_heads": heads * COPIES,
            }
        )
    ).to(torch.bfloat16)
    weights = model.state_dict()
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
        for index, layer in enumerate(wide.model.layers):
            if index >= config.num_hidden_layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
                continue
            old, new = model.model.layers[index].self_attn, layer.self_attn
            queries = old.q_proj.weight.view(heads, size, hidden)
            new.q_proj.weight.copy_(queries.repeat(COPIES, 1, 1).flatten(0, 1))
            for name in ("k_proj", "v_proj"):
                rows = getattr(old, name).weight.view(-1, size, hidden).repeat_interleave(group, 0)
                getattr(new, name).weight.copy_(rows.repeat(COPIES, 1, 1).flatten(0, 1))
            new.o_proj.weight.copy_(old.o_proj.weight.repeat(1, COPIES) / COPIES)
    wide.save_pretrained(target)
    written = target / "config.json"
    # vLLM has no class by Ministral's name; its Llama knows layers with a window.
    written.write_text(written.read_text().replace("MinistralForCausalLM", "LlamaForCausalLM"))
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


@contextmanager
def model_folder(name: str) -> Iterator[str]:
    """What vLLM is to load for `--model`: a folder with the copy of that name, else the name itself."""
    if name != KV_HEAVY and name not in KV_HEAVY_HYBRIDS:
        yield name
        return
    with tempfile.TemporaryDirectory() as directory:
        if name == KV_HEAVY:
            write_kv_heavy(TINY_LLAMA, Path(directory))
        else:
            write_kv_heavy(TINY_HYBRID, Path(directory), KV_HEAVY_HYBRIDS[name])
        yield directory
