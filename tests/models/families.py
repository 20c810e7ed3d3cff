# SPDX-License-Identifier: Apache-2.0
"""Model families in tiny: `test_matrix.py` tests them, `models_page.py` writes docs/models.md from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines import POLICIES

RUNNERS = ("V1", "V2")

VOCAB_SIZE = 512
# Prompts have up to 640 tokens; every window below is much shorter.
MAX_POSITIONS = 1024
_SIZES = dict(vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=192, num_hidden_layers=4)
_SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS)
_SIZES |= dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
_SCALED = {"factor": 4.0, "original_max_position_embeddings": 256}  # RoPE
# A multimodal model's vocabulary is that of the shipped model's tokenizer and these four tokens.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEXT_TOKENS = 2048
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(_TEXT_TOKENS, _TEXT_TOKENS + len(VISION_TOKENS))


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models and its tiny configuration."""

    name: str  # on the page
    model_type: str  # of `transformers`
    sizes: Mapping[str, Any]  # fields in addition to, or instead of, the common ones
    peculiar: str  # settings that the tiny model shares with large ones, for the page
    refusals: Mapping[str, str] = field(default_factory=dict)  # by policy, how the error message begins
    engine: Mapping[str, Any] = field(default_factory=dict)  # arguments of every engine
    embedding_std: float = 1.0  # if large, a tied head repeats the latest token
    seed: int = 0  # chosen so that no two best logits are close for the matrix's prompts
    caches_prefixes: bool = True  # and chunks prompts, in vLLM's CPU build
    window_excess: int = 0  # tokens by which vLLM's windows are longer than those of `transformers`
    is_local: bool = False  # every layer has a window, so a view of that length holds all visible tokens
    is_multimodal: bool = False  # prompts have images or video

    @property
    def configuration(self) -> dict[str, Any]:
        return dict(self.sizes) if self.is_multimodal else {**_SIZES, **self.sizes}


_MLA = {
    policy: f"magicdec-self: draft_kv_policy={fields['draft_kv_policy']!r} reads keys of KV heads, and MLA "
    "models cache one latent vector per token instead; use draft_kv_policy='streamingllm'"
    for policy, fields in POLICIES.items()
    if fields
}


def _rope(rope_type: str, theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


def _alternating(*types: str, layers: int) -> list[str]:
    return [f"{types[i % len(types)]}_attention" for i in range(layers)]


FAMILIES = (
    Family(
        "Llama",
        "llama",
        _rope("llama3", 500000.0, **_SCALED, low_freq_factor=1.0, high_freq_factor=4.0),
        "grouped queries, Llama 3's scaled RoPE",
        seed=11,
    ),
    Family(
        "Qwen2", "qwen2", {"tie_word_embeddings": True}, "biases, tied head", embedding_std=0.3, seed=12
    ),
    Family(
        "Qwen3", "qwen3", {"head_dim": 64}, "norms of queries and keys, heads wider than the model", seed=12
    ),
    Family(
        "Qwen3-MoE",
        "qwen3_moe",
        dict(
            head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        ),
        "8 experts, 2 per token, norms of queries and keys",
        seed=11,
    ),
    Family(
        "Mixtral",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "4 experts, 2 per token",
        seed=13,
    ),
    Family(
        "Mistral", "mistral", {"sliding_window": 96}, "a window of 96 in every layer", is_local=True, seed=8
    ),
    Family(
        "Gemma 2",
        "gemma2",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 24,
            "sliding_window": 96,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 20.0,
            "layer_types": _alternating("sliding", "full", layers=4),
        },
        "a window of 96 in every second layer, soft caps, attention scale, tied head",
        embedding_std=0.03,
        seed=13,
    ),
    Family(
        "Gemma 3",
        "gemma3_text",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 96,
            # 5 with a window and 2 without: groups of two layers, the last one padded.
            "num_hidden_layers": 7,
            "layer_types": _alternating("sliding", "sliding", "full", layers=7),
        },
        "a window of 96 in two layers of three, another RoPE there, norms of queries and keys, tied head",
        embedding_std=0.03,
        seed=11,
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 32,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            **_rope("yarn", 150000.0, **_SCALED, beta_fast=32.0, beta_slow=1.0, truncate=False),
        },
        "learned sinks, a window of 64 in every second layer, 4 experts with biases, YaRN",
        seed=8,
    ),
    Family(
        "Phi-3",
        "phi3",
        {"hidden_size": 256, **_rope("default", 10000.0, partial_rotary_factor=0.75)},
        "RoPE on three quarters of a head, merged projections",
        seed=14,
    ),
    Family(
        "OLMo 2",
        "olmo2",
        {"num_key_value_heads": 4},
        "norms behind the layers and of all queries and keys, vLLM's Transformers backend",
        seed=14,
    ),
    Family(
        "GPT-NeoX",
        "gpt_neox",
        dict(hidden_size=256, num_key_value_heads=4, **_rope("default", 1e4, partial_rotary_factor=0.25)),
        "RoPE on a quarter of a head, parallel residuals, biases, vLLM's Transformers backend",
        embedding_std=0.3,
        seed=11,
    ),
    Family(
        "OPT",
        "opt",
        {"ffn_dim": 192, "num_key_value_heads": 4},
        "learned positions, biases, tied head",
        embedding_std=0.3,
        seed=13,
    ),
    Family(
        "Granite",
        "granite",
        dict(
            embedding_multiplier=2.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=0.5
        ),
        "multipliers of embeddings, residuals, attention and logits",
        seed=14,
    ),
    Family(
        "Cohere 2",
        "cohere2",
        dict(sliding_window=64, layer_types=_alternating("sliding", "full", layers=4), logit_scale=1.0),
        "a window of 64 in every second layer, no RoPE in the others, parallel residuals, tied head",
        embedding_std=0.3,
        window_excess=1,  # Cohere's window excludes the token itself, as vLLM notes
        seed=13,
    ),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            # vLLM's CPU kernel for MLA supports only 512 + 64.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            **_rope(
                "yarn", 10000.0, **_SCALED, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707
            ),
        },
        "MLA, YaRN, a dense layer, then 4 experts and a shared one",
        refusals=_MLA,
        # vLLM's CPU kernel for MLA has this page size only, and unchunked prompts must fit into a step.
        # With AMX, vLLM would choose a kernel without float32.
        engine={"block_size": 16, "max_num_batched_tokens": MAX_POSITIONS, "attention_backend": "CPU_MLA"},
        caches_prefixes=False,
        seed=9,
    ),
    Family(
        "Qwen2-VL",
        "qwen2_vl",
        {
            "text_config": {
                **_SIZES,
                "vocab_size": _TEXT_TOKENS + 64,
                **_rope("default", 1000000.0, mrope_section=[4, 6, 6]),
            },
            "vision_config": dict(depth=2, embed_dim=64, hidden_size=128, num_heads=2, mlp_ratio=2),
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "image_token_id": IMAGE_PAD,
            "video_token_id": VIDEO_PAD,
        },
        "images of many sizes, video, M-RoPE",
        engine={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 1}},
        is_multimodal=True,
    ),
)
