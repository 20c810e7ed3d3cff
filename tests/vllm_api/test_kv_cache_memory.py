# SPDX-License-Identifier: Apache-2.0
"""The KV cache and what drafting keeps beside it fit into the memory that vLLM found available."""

import gc
from pathlib import Path

import pytest
import spire_drafts
import torch
from small_models import write_llama
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, SlidingWindowSpec

from vllm_magicdec.attention import switch
from vllm_magicdec.attention.flashinfer_attention import Geometry, plan_bytes
from vllm_magicdec.drafting import sizing
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register
from vllm_magicdec.vllm_api.kv_cache import leave_memory_for_drafting

register()

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, PAGE = 4, 4, 2, 32, 32
AVAILABLE = 2**30
POLICIES = [
    {"draft_kv_policy": "streamingllm"},
    {"draft_kv_policy": "snapkv", "draft_kv_granularity": "page"},
    {"draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    {"draft_kv_policy": "verify-topk"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
    sizes = {"hidden_size": NUM_HEADS * HEAD_SIZE, "num_hidden_layers": NUM_LAYERS}
    return write_llama(tmp_path_factory.mktemp("model"), **sizes, **heads)


def configure(model_dir, speculative_config=None, kv_cache_dtype="auto"):
    dtypes = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    sizes = {"max_model_len": 4096, "block_size": PAGE, "max_num_seqs": 64, "skip_tokenizer_init": True}
    args = EngineArgs(model=model_dir, speculative_config=speculative_config, **sizes, **dtypes)
    config = args.create_engine_config()
    config.cache_config.kv_cache_memory_bytes = None  # which the environment of tests may give
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def specs(kind=FullAttentionSpec, dtype=torch.bfloat16, head_size=HEAD_SIZE, **more):
    spec = kind(block_size=PAGE, num_kv_heads=NUM_KV_HEADS, head_size=head_size, dtype=dtype, **more)
    return {f"layer {index}": spec for index in range(NUM_LAYERS)}


IN_FP8 = dict(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def num_blocks(config, available=AVAILABLE, **of_specs) -> int:
    groups = ()
    if hasattr(core, "get_global_kv_cache_groups"):  # since vLLM 0.33
        groups = (core.get_global_kv_cache_groups(config, [specs(**of_specs)]),)
    (laid_out,) = core.get_kv_cache_configs(config, [specs(**of_specs)], [available], *groups)
    return laid_out.num_blocks


def tensor_bytes() -> int:
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cpu}
    return sum(storages.values())


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_the_kv_cache_and_what_drafting_keeps_fit_into_what_is_available(model_dir, policy, cache):
    config = configure(model_dir, {"method": METHOD, **policy}, cache)
    of_specs = IN_FP8 if cache == "fp8" else {}
    block_bytes = sum(spec.page_size_bytes for spec in specs(**of_specs).values())
    blocks = num_blocks(config, **of_specs)
    group = LayerGroup(tuple(specs()), 0, specs(**of_specs)["layer 0"], None)
    before = tensor_bytes()
    hooks = {"observe": None, "switch_attention": lambda recorder=None, *, layer_pages=False: ()}
    views = sizing.make_views(config, group, num_blocks=blocks, device=torch.device("cpu"), **hooks)
    kept = tensor_bytes() - before
    scratch = views.memory_bytes.get("a selection's scratch", 0)
    assert policy["draft_kv_policy"] == "streamingllm" or scratch > 0
    # A few numbers for each request are not counted.
    small = 2**20
    assert blocks * block_bytes + kept + scratch <= AVAILABLE + small
    assert (blocks + 1) * block_bytes + kept + scratch > AVAILABLE - small
    if policy["draft_kv_policy"] == "verify-topk":
        # Of every page of keys and values a least and a greatest key, in bfloat16.
        assert kept > blocks * block_bytes / PAGE * (2 if cache == "fp8" else 1)


def test_other_methods_get_all_of_it_and_a_given_size_is_left(model_dir):
    block_bytes = sum(spec.page_size_bytes for spec in specs().values())
    assert num_blocks(configure(model_dir)) == AVAILABLE // block_bytes
    config = configure(model_dir, {"method": METHOD, "draft_kv_policy": "verify-topk"})
    less = num_blocks(config)
    config.cache_config.kv_cache_memory_bytes = AVAILABLE
    assert num_blocks(config) > less
    config.cache_config.kv_cache_memory_bytes = None
    config.cache_config.num_gpu_blocks_override = 300
    assert num_blocks(config) == 300


def test_layers_with_a_window_keep_nothing_of_what_a_policy_selects(model_dir):
    """A block of vLLM's pool serves layers of one kind; there is a summary of each all the same."""
    config = configure(model_dir, {"method": METHOD, "draft_kv_policy": "verify-topk"})
    windows = specs(SlidingWindowSpec, sliding_window=64)
    assert AVAILABLE - leave_memory_for_drafting(config, windows, AVAILABLE) < 2**20
    hybrid = {name: (specs() if index % 2 else windows)[name] for index, name in enumerate(specs())}
    taken = [AVAILABLE - leave_memory_for_drafting(config, kind, AVAILABLE) for kind in (specs(), hybrid)]
    # Half of the layers have summaries, and a block is half as large: it has as much beside it.
    assert 0.4 * taken[0] < taken[1] < 1.05 * taken[0]


def test_a_cache_that_no_view_knows_is_refused_with_its_layer(model_dir):
    config = configure(model_dir, {"method": METHOD})
    latent = specs(MLAAttentionSpec, is_index_group_leader=True)
    with pytest.raises(MagicDecConfigError, match=r"layer layer 0 \(MLAAttentionSpec\)"):
        leave_memory_for_drafting(config, latent, AVAILABLE)


def test_a_spire_draft_leaves_what_its_own_layers_take(tmp_path, monkeypatch):
    """A draft model of another kind reads by block tables, which take next to nothing."""
    target = Path(__file__).parents[2] / "examples" / "tiny-llama"
    spire = spire_drafts.write(tmp_path / "spire", target, num_layers=2, sinks=3, window=37)
    left = {}
    for draft in (spire, target.parents[1] / "benchmarks" / "tiny-draft"):
        config = configure(str(target), {"method": MODEL_METHOD, "model": str(draft)})
        monkeypatch.setattr(config.device_config, "device_type", "cuda")
        own = specs(head_size=64)
        layers = {f"model.{name}": spec for name, spec in own.items()}
        layers |= {f"draft_model.model.{name}": own[name] for name in list(own)[:2]}
        for installed in (False, True):
            monkeypatch.setattr(switch, "has_flashinfer", lambda installed=installed: installed)
            left[draft.name, installed] = leave_memory_for_drafting(config, layers, AVAILABLE)
    geometry = Geometry(NUM_HEADS, NUM_KV_HEADS, 64, torch.bfloat16, torch.bfloat16, 1.0)
    of_plans = plan_bytes(geometry, 0)[0]
    assert AVAILABLE > left["spire", False] >= left["spire", True] + of_plans
    assert left["tiny-draft", True] == left["tiny-draft", False] == AVAILABLE
