# SPDX-License-Identifier: Apache-2.0
"""The shape of a model, read from its `config.json`, which determines its costs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SPIRE = "MagicDecSpireForCausalLM"  # architecture of the drafts of `magicdec train-draft`


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder-only transformer with gated MLPs, equal in all layers.

    Biases, q/k norms (below 0.1 % of the parameters) and shared experts are left out.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # per expert in mixture-of-experts models
    vocab_size: int
    weight_bytes: float = 2.0  # per parameter
    kv_bytes: float = 2.0  # per K/V element
    num_experts: int = 1
    num_active_experts: int = 1  # per token
    tied_embeddings: bool = False
    num_window_layers: int = 0  # the other layers see the whole context
    window: int = 0  # tokens that window layers see (a sliding window, or a local chunk)
    is_spire: bool = False  # a draft with keys and values of memory vectors (arXiv 2504.06419)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """Read a Hugging Face `config.json`; of a multimodal model, its language model.

        Raises:
            ValueError: a field is missing, or the attention has no K/V heads.
        """
        text = {**config, **config.get("text_config", {})}
        if text.get("kv_lora_rank"):
            raise ValueError("MLA models (kv_lora_rank) cache no K/V heads and are not supported")
        try:
            num_heads, hidden_size = text["num_attention_heads"], text["hidden_size"]
            num_experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 1
            dense_size = text["intermediate_size"]
            always_tied = str(text.get("model_type")).startswith(("gemma", "cohere"))
            return cls(
                name=name or str(text.get("model_type", "model")),
                num_layers=text["num_hidden_layers"],
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=_first(text, "num_key_value_heads") or num_heads,
                head_size=_first(text, "head_dim") or hidden_size // num_heads,
                intermediate_size=_first(text, "moe_intermediate_size") or dense_size,
                vocab_size=text["vocab_size"],
                weight_bytes=_weight_bytes(text),
                num_experts=num_experts,
                num_active_experts=text["num_experts_per_tok"] if num_experts > 1 else 1,
                tied_embeddings=bool(text.get("tie_word_embeddings", always_tied)),
                **_windows(text),
                is_spire=SPIRE in text.get("architectures", ()),
            )
        except KeyError as missing:
            raise ValueError(f"the model's configuration has no field {missing}") from None

    def spire_draft(self) -> "ModelShape":
        """Return the shape of this target's SPIRe draft, which has a quarter of its layers."""
        layers = max(1, (self.num_layers + 2) // 4)  # a half rounds up
        return replace(
            self,
            name=f"SPIRe draft of {self.name}",
            num_layers=layers,
            num_window_layers=round(self.num_window_layers / self.num_layers * layers),
            is_spire=True,
        )

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four attention projections."""
        return 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)

    @property
    def key_value_parameters(self) -> int:
        """Parameters of one layer's key and value projections."""
        return 2 * self.hidden_size * self.head_size * self.num_kv_heads

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert, or the dense MLP, of one layer: gate, up, down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """Parameters stored in memory."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * self.hidden_size
        layer = self.attention_parameters + self.num_experts * self.expert_parameters + router + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def parameters_read(self, query_tokens: float) -> float:
        """Return the number of parameters that a pass over `query_tokens` reads.

        The input embedding is a lookup and not counted. Uniform routing determines the number of experts.
        """
        missed = (1 - self.num_active_experts / self.num_experts) ** query_tokens
        experts = self.num_experts * (1 - missed) * self.expert_parameters
        return self.num_layers * (self.attention_parameters + experts) + self.vocab_size * self.hidden_size

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs of the linear layers per token, 2 per active parameter.

        A SPIRe draft projects to keys and values twice, for the token and for its memory vector.
        """
        layer = self.attention_parameters + self.num_active_experts * self.expert_parameters
        layer += self.key_value_parameters if self.is_spire else 0
        return 2 * (self.num_layers * layer + self.vocab_size * self.hidden_size)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.kv_bytes

    def kv_share(self, context: float) -> float:
        """Return the share of a context's tokens that layers read, and keep in the hybrid KV cache."""
        window_share = self.num_window_layers / self.num_layers
        return 1 - window_share + window_share * min(1.0, self.window / max(1, context))


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)


# Period of full-attention layers, where the configurations of a family may leave it out.
_FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "llama4_text": 4}


def _windows(config: Mapping[str, Any]) -> dict[str, int]:
    """Return `num_window_layers` and `window`, or nothing."""
    window = _first(config, "sliding_window", "attention_chunk_size")
    if not window or config.get("use_sliding_window") is False:
        return {}
    layers = config["num_hidden_layers"]
    default = _FULL_ATTENTION_EVERY.get(str(config.get("model_type")))
    every = _first(config, "sliding_window_pattern") or default
    if types := config.get("layer_types"):
        window_layers = sum(layer_type != "full_attention" for layer_type in types)
    elif every:
        window_layers = layers - layers // every
    else:
        window_layers = layers - config.get("max_window_layers", 0)  # Qwen2: the first layers have none
    return {"num_window_layers": window_layers, "window": window}


def _weight_bytes(config: Mapping[str, Any]) -> float:
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4":
        return 4.25 / 8  # of the experts, which hold most parameters
    if quantization.get("quant_method") == "fp8":
        return 1.0
    if "bits" in quantization:
        return float(quantization["bits"]) / 8
    if quantization:
        raise ValueError(
            f"the weight size of quantization {quantization.get('quant_method')!r} is unknown; "
            "give --weight-bytes"
        )
    dtype = config.get("dtype") or config.get("torch_dtype")
    return 4.0 if dtype == "float32" else 2.0
