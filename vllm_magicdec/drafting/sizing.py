# SPDX-License-Identifier: Apache-2.0
"""Views, graph sizes and memory of drafting, derived from an engine's configuration.

vLLM gives the KV cache the memory that is left after a profile run. Views are made later, so their memory
must be known before.
"""

import sys
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig

from vllm_magicdec.attention.flashinfer_attention import Geometry
from vllm_magicdec.attention.observing import LayerObserver, QueryRecorder
from vllm_magicdec.attention.plans import CommonLengthPlans
from vllm_magicdec.attention.rows import read_dtype
from vllm_magicdec.attention.scales import stored_dtype
from vllm_magicdec.attention.switch import flashinfer_refusal
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.policies.base import Engine, Limits, Observe, SwitchAttention
from vllm_magicdec.views.pages import PageViews
from vllm_magicdec.views.round import Views
from vllm_magicdec.views.selections import Budget
from vllm_magicdec.views.windows import ReachedPages

# Rows of a draft graph per request, and rows that pad a small batch, at most. Draft steps mostly read
# weights, so padding costs little; every graph costs start-up time, for each kind of step and again while
# vLLM measures the memory of graphs.
_MAX_ROWS_RATIO, _MAX_SMALL_PADDING = 1.25, 8


def draft_graph_sizes(
    vllm_config: VllmConfig, num_queries: int = 1, max_tokens: int = sys.maxsize
) -> list[int]:
    """Return the batch sizes, ascending, whose draft steps get CUDA graphs.

    These are the largest batch and as few of vLLM's capture sizes as pad other batches little. vLLM's sizes
    are tokens of verifications: multiples of 8 up to 256, of 16 up to 512, and of a verification's length.

    Args:
        max_tokens: upper bound of a graph's tokens, in addition to vLLM's.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    # Models are compiled for at most the tokens of a step. Backends prepare for graphs of at most vLLM's
    # largest size: beyond it FlashAttention 3 chooses splits that a graph cannot keep.
    max_tokens = min(
        max_tokens, scheduler.max_num_batched_tokens, compilation.max_cudagraph_capture_size or 0
    )
    kept = [min(scheduler.max_num_seqs, max_tokens // num_queries)]
    sizes = compilation.cudagraph_capture_sizes
    if not sizes or not kept[0]:
        return []
    while smaller := [n for n in sizes if n < kept[-1]]:
        kept.append(min((n for n in smaller if kept[-1] <= _max_rows(n)), default=max(smaller)))
    return kept[::-1]


def _max_rows(size: int) -> float:
    """Return the largest graph for batches of more than `size` requests."""
    return max(_MAX_ROWS_RATIO * (size + 1), min(size + _MAX_SMALL_PADDING, 2 * size))


def max_graph_reqs(vllm_config: VllmConfig) -> int:
    """Return the largest batch of a draft step with a CUDA graph; 0 without graphs."""
    has_graphs = vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if not (has_graphs and vllm_config.use_v2_model_runner):
        return 0
    return max(draft_graph_sizes(vllm_config), default=0)


def make_views(
    vllm_config: VllmConfig,
    group: LayerGroup,
    *,
    num_blocks: int,
    device: torch.device,
    observe: Observe,
    switch_attention: SwitchAttention,
) -> Views:
    """Make the views of a group of layers.

    The policy makes the views of layers that attend to the whole context; others get views of their reach,
    within the same budget.
    """
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    model = _drafting_model(vllm_config)
    scheduler, cache = vllm_config.scheduler_config, group.cache
    engine = Engine(
        limits=spec.limits(vllm_config, cache.block_size),
        num_layers=len(group.layer_names),
        num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        num_kv_heads=cache.num_kv_heads,
        head_size=cache.head_size,
        query_dtype=model.dtype,
        cache_dtype=read_dtype(stored_dtype(cache, vllm_config.cache_config.cache_dtype)),
        num_blocks=num_blocks,
        max_num_reqs=scheduler.max_num_seqs,
        max_batched_tokens=scheduler.max_num_batched_tokens,
        device=device,
        observe=observe,
        switch_attention=switch_attention,
        has_key_bias=_has_key_bias(model.hf_text_config),
    )
    if group.reach is not None:
        slots, max_tokens = engine.make_draft_slots(), spec.budget_tokens(engine.limits.max_model_len)
        return PageViews(ReachedPages(group.reach, max_tokens, slots), slots)
    return spec.policy.make_views(spec, engine, parse_budget(spec, engine.limits))


def _drafting_model(vllm_config: VllmConfig) -> ModelConfig:
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    return spec.draft_model_config if spec.has_draft_model else vllm_config.model_config


def parse_budget(spec: MagicDecSpeculativeConfig, limits: Limits) -> Budget:
    """Return the budget in the policy's units; raise MagicDecConfigError if the policy refuses it."""
    try:
        return spec.policy.parse_budget(spec, limits, spec.draft_kv_budget)
    except ValueError as error:  # vLLM may have enlarged the pages since the configuration was checked
        raise MagicDecConfigError(f"{METHOD}: {error}") from None


def memory_of_drafting(vllm_config: VllmConfig, groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Compute the memory of the views by making them on torch's device "meta".

    Returns:
        Bytes, and bytes for each block of the KV cache in all layers.
    """
    meta = torch.device("meta")

    def observe(indices: Sequence[int], window: int, observer: LayerObserver) -> None:
        raise AssertionError("measured views prepare no round")

    def num_bytes(num_blocks: int) -> int:
        views = (
            make_views(
                vllm_config,
                group,
                num_blocks=num_blocks,
                device=meta,
                observe=observe,
                switch_attention=_measure_attention(vllm_config, group, meta),
            )
            for group in groups
        )
        return sum(sum(view.memory_bytes.values()) for view in views)

    fixed = num_bytes(0)
    return fixed, num_bytes(1) - fixed


def _measure_attention(vllm_config: VllmConfig, group: LayerGroup, meta: torch.device) -> SwitchAttention:
    """Return a stand-in for `attention.switch.install_switches` that only takes memory."""

    def switch_attention(
        recorder: QueryRecorder | None = None, *, layer_pages: bool = False
    ) -> Sequence[CommonLengthPlans]:
        if layer_pages or vllm_config.device_config.device_type != "cuda":
            return []
        cache, model = group.cache, _drafting_model(vllm_config)
        geometry = Geometry(
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            num_kv_heads=cache.num_kv_heads,
            head_size=cache.head_size,
            query_dtype=model.dtype,
            cache_dtype=stored_dtype(cache, vllm_config.cache_config.cache_dtype),
            scale=1.0,
        )
        if flashinfer_refusal(geometry) is not None:
            return []
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        graph_reqs = max_graph_reqs(vllm_config)
        return [
            CommonLengthPlans(geometry, max_num_reqs=max_num_reqs, max_graph_reqs=graph_reqs, device=meta)
        ]

    return switch_attention


def _has_key_bias(config: PretrainedConfig) -> bool:
    """Return whether the projection of keys has a bias, by a text model's config."""
    names = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias")
    return config.model_type.startswith("qwen2") or any(getattr(config, name, False) for name in names)
