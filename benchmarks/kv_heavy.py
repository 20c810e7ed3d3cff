# SPDX-License-Identifier: Apache-2.0
"""Create copies of the shipped model with the same function and a much larger KV cache.

The shipped model has 3 KiB of K/V per token (bfloat16). The copy computes the same function with eight KV
heads, as multi-head attention, and eight layers: 16 KiB per token with 5 million weights. So acceptance
lengths are those of a trained model, while reading the KV cache takes most of a decode step, as with long
contexts and large batches of large models.

- Every query head gets its own KV head, a copy of its group's.
- Every head exists twice, each with half of the output weight (exact in bfloat16).
- Up to eight layers are added with zero output projections: they read their KV cache and add nothing.

`kv-heavy-grouped` has the heads of Llama-3.1-8B instead, 32 query heads over 8 KV heads of size 128: KV
heads exist four times and their query heads eight times, every second dimension of a head is zero, and
queries are scaled by the root of 2, which bfloat16 rounds. It has 32 KiB per token.

The hybrid model (tiny-hybrid), half of whose four layers have a window, has copies with 2, 4 and 6 of eight
layers that see the whole context, by the type of the added layers.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import real_models

KV_HEAVY = "kv-heavy"
KV_HEAVY_GROUPED = "kv-heavy-grouped"
KV_HEAVY_HYBRIDS = {f"kv-heavy-{number}-full": number for number in (2, 4, 6)}
TINY_LLAMA = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
TINY_HYBRID = Path(__file__).resolve().parent / "tiny-hybrid"
NUM_LAYERS = 8


@dataclass(frozen=True)
class Heads:
    """The heads of a copy, as indices of the original's heads."""

    queries: Sequence[int]
    kv: Sequence[int]
    widening: int = 1  # dimensions per original dimension, a power of 2

    def take(self, weight: torch.Tensor, heads: Sequence[int], size: int) -> torch.Tensor:
        """Convert [original heads * size, hidden] to [len(heads) * size * widening, hidden].

        New dimensions follow each original one, which then keeps its rotary frequency in the larger head.
        """
        rows = weight.view(-1, size, weight.shape[-1])[list(heads)]
        wide = rows.new_zeros(*rows.shape[:2], self.widening, rows.shape[2])
        wide[:, :, 0] = rows
        return wide.flatten(0, 2)


def multi_head(num_queries: int, num_kv: int) -> Heads:
    """Return every query head twice, with its own KV head."""
    queries = [*range(num_queries)] * 2
    return Heads(queries, [head * num_kv // num_queries for head in queries])


def grouped(num_queries: int, num_kv: int) -> Heads:
    """Return every KV head four times, with its query heads twice, in heads of twice the size."""
    kv, group = [*range(num_kv)] * 4, num_queries // num_kv
    return Heads([head * group + i for head in kv for i in range(group) for _ in range(2)], kv, widening=2)


def write_kv_heavy(
    source: Path,
    target: Path,
    num_full: int = NUM_LAYERS,
    make_heads: Callable[[int, int], Heads] = multi_head,
) -> None:
    """Write the copy of the model in `source` to `target`, with its tokenizer.

    Args:
        source: folder of the original.
        target: folder to write.
        num_full: layers of the copy that see the whole context; all in a Llama.
        make_heads: returns the copy's heads for the original's numbers of query and KV heads.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = model.config
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    added = NUM_LAYERS - len(types)
    num_added_full = num_full - types.count("full_attention")
    if not 0 <= num_added_full <= added:
        raise ValueError(f"no copy of {source} has {num_full} layers of {NUM_LAYERS} that see everything")
    types += ["full_attention"] * num_added_full + ["sliding_attention"] * (added - num_added_full)
    size = config.head_dim
    heads = make_heads(config.num_attention_heads, config.num_key_value_heads)
    wide = type(model)(
        type(config)(
            **{
                **config.to_dict(),
                "num_hidden_layers": NUM_LAYERS,
                "layer_types": types,
                "num_attention_heads": len(heads.queries),
                "num_key_value_heads": len(heads.kv),
                "head_dim": size * heads.widening,
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
            # Compensates the larger head size in the scale of attention.
            queries = old.q_proj.weight.float() * heads.widening**0.5
            new.q_proj.weight.copy_(heads.take(queries, heads.queries, size))
            new.k_proj.weight.copy_(heads.take(old.k_proj.weight, heads.kv, size))
            new.v_proj.weight.copy_(heads.take(old.v_proj.weight, heads.kv, size))
            of_heads = heads.take(old.o_proj.weight.T, heads.queries, size).T
            new.o_proj.weight.copy_(of_heads * config.num_attention_heads / len(heads.queries))
    wide.save_pretrained(target)
    written = target / "config.json"
    # vLLM has no Ministral class, but its Llama supports layers with a window.
    written.write_text(written.read_text().replace("MinistralForCausalLM", "LlamaForCausalLM"))
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


@contextmanager
def model_folder(name: str) -> Iterator[str]:
    """Yield the model that vLLM loads for `--model`.

    That is a temporary copy or a folder of `make models` with this name, or the name itself.
    """
    if name in real_models.MODELS:
        yield str(real_models.folder_of(name))
        return
    if name not in (KV_HEAVY, KV_HEAVY_GROUPED) and name not in KV_HEAVY_HYBRIDS:
        yield name
        return
    with tempfile.TemporaryDirectory() as directory:
        if name == KV_HEAVY:
            write_kv_heavy(TINY_LLAMA, Path(directory))
        elif name == KV_HEAVY_GROUPED:
            write_kv_heavy(TINY_LLAMA, Path(directory), make_heads=grouped)
        else:
            write_kv_heavy(TINY_HYBRID, Path(directory), KV_HEAVY_HYBRIDS[name])
        yield directory
