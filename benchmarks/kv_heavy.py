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

`kv-heavy-grouped` has the heads of Llama-3.1-8B instead, 32 over 8 KV heads, of 128: KV heads are there
four times, their query heads eight times, every second of a head's dimensions is zero, and queries are
larger by the root of 2, which bfloat16 rounds. 32 KiB per token.

Of the hybrid sibling (tiny-hybrid), half of whose four layers have a window, there are copies with 2, 4 and
6 layers of eight that see the whole context, by the kind of the added ones: the same function at another
cost.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KV_HEAVY = "kv-heavy"
KV_HEAVY_GROUPED = "kv-heavy-grouped"
KV_HEAVY_HYBRIDS = {f"kv-heavy-{number}-full": number for number in (2, 4, 6)}
TINY_LLAMA = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
TINY_HYBRID = Path(__file__).resolve().parent / "tiny-hybrid"
NUM_LAYERS = 8


@dataclass(frozen=True)
class Heads:
    """Those of a copy, by the model's that they are copies of."""

    queries: Sequence[int]
    """Of each query head."""
    kv: Sequence[int]
    """Of each KV head."""
    widening: int = 1
    """Dimensions for one of the model's: a power of 2."""

    def take(self, weight: torch.Tensor, heads: Sequence[int], size: int) -> torch.Tensor:
        """[model's heads * size, hidden] -> [len(heads) * size * widening, hidden].

        New dimensions stand behind each old one: in a head so much larger the old ones have the rotary
        frequencies that they had.
        """
        rows = weight.view(-1, size, weight.shape[-1])[list(heads)]
        wide = rows.new_zeros(*rows.shape[:2], self.widening, rows.shape[2])
        wide[:, :, 0] = rows
        return wide.flatten(0, 2)


def multi_head(num_queries: int, num_kv: int) -> Heads:
    """Every query head twice, with a KV head of its own."""
    queries = [*range(num_queries)] * 2
    return Heads(queries, [head * num_kv // num_queries for head in queries])


def grouped(num_queries: int, num_kv: int) -> Heads:
    """Every KV head four times, with its query heads twice; heads of twice the size."""
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
        num_full: layers of the copy that see the whole context; a Llama's all do.
        make_heads: of the copy, from the numbers of query and KV heads of the model.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = model.config
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    added = NUM_LAYERS - len(kinds)
    num_added_full = num_full - kinds.count("full_attention")
    if not 0 <= num_added_full <= added:
        raise ValueError(f"no copy of {source} has {num_full} layers of {NUM_LAYERS} that see everything")
    kinds += ["full_attention"] * num_added_full + ["sliding_attention"] * (added - num_added_full)
    size = config.head_dim
    heads = make_heads(config.num_attention_heads, config.num_key_value_heads)
    wide = type(model)(
        type(config)(
            **{
                **config.to_dict(),
                "num_hidden_layers": NUM_LAYERS,
                "layer_types": kinds,
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
            # Softmax divides by the root of a head's size.
            queries = old.q_proj.weight.float() * heads.widening**0.5
            new.q_proj.weight.copy_(heads.take(queries, heads.queries, size))
            new.k_proj.weight.copy_(heads.take(old.k_proj.weight, heads.kv, size))
            new.v_proj.weight.copy_(heads.take(old.v_proj.weight, heads.kv, size))
            of_heads = heads.take(old.o_proj.weight.T, heads.queries, size).T
            new.o_proj.weight.copy_(of_heads * config.num_attention_heads / len(heads.queries))
    wide.save_pretrained(target)
    written = target / "config.json"
    # vLLM has no class by Ministral's name; its Llama knows layers with a window.
    written.write_text(written.read_text().replace("MinistralForCausalLM", "LlamaForCausalLM"))
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


@contextmanager
def model_folder(name: str) -> Iterator[str]:
    """What vLLM is to load for `--model`: a folder with the copy of that name, else the name itself."""
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
