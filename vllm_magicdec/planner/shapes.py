# SPDX-License-Identifier: Apache-2.0
"""What the costs of a model follow from: its shape, from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SPIRE = "MagicDecSpireForCausalLM"  # what `magicdec train-draft` writes as the architecture of its drafts
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class ModelShape:
    """What of a decoder-only transformer decides its cost.

    MLPs are gated and the same in all layers. Biases and q/k norms (below 0.1 % of the parameters) and
    shared experts are left out.
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
    num_window_layers: int = 0  # of all layers; the others see the whole context
    window: int = 0  # tokens that those reach (a sliding window, or a local chunk)
    is_spire: bool = False  # a draft whose keys and values are made of memory vectors (arXiv 2504.06419)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """The shape in a Hugging Face `config.json` (of a multimodal model: its language model).

        Raises:
            ValueError: a field is missing, or the attention is not one with K/V heads.
        """
        text = {**config, **config.get("text_config", {})}
        if text.get("kv_lora_rank"):
            raise ValueError("MLA models (kv_lora_rank) cache no K/V heads and are not supported")
        try:
            num_heads, hidden_size = text["num_attention_heads"], text["hidden_size"]
            num_experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 1
            dense_size = text["intermediate_size"]
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
                tied_embeddings=bool(text.get("tie_word_embeddings", _is_tied(text))),
                **_windows(text),
                is_spire=SPIRE in text.get("architectures", ()),
            )
        except KeyError as missing:
            raise ValueError(f"the model's configuration has no field {missing}") from None

    def spire_draft(self) -> "ModelShape":
        """The draft that SPIRe makes of this target: a quarter of its layers, all else alike."""
        layers = max(1, (self.num_layers + 2) // 4)  # a half rounds up
        near = round(self.num_window_layers / self.num_layers * layers)
        return replace(
            self,
            name=f"SPIRe draft of {self.name}",
            num_layers=layers,
            num_window_layers=near,
            is_spire=True,
        )

    @property
    def attention_parameters(self) -> int:
        """Of the four projections of one layer."""
        return 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)

    @property
    def key_value_parameters(self) -> int:
        """Of the two projections of one layer to keys and values."""
        return 2 * self.hidden_size * self.head_size * self.num_kv_heads

    @property
    def expert_parameters(self) -> int:
        """Of one expert (or the dense MLP) of one layer: gate, up, down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """All, as they lie in memory."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * self.hidden_size
        layer = self.attention_parameters + self.num_experts * self.expert_parameters + router + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def parameters_read(self, query_tokens: float) -> float:
        """Parameters that a pass over `query_tokens` reads: all but the input embedding, whose rows it
        looks up; of experts the expected number that uniform routing hits."""
        missed = (1 - self.num_active_experts / self.num_experts) ** query_tokens
        experts = self.num_experts * (1 - missed) * self.expert_parameters
        return self.num_layers * (self.attention_parameters + experts) + self.vocab_size * self.hidden_size

    @property
    def linear_flops_per_token(self) -> int:
        """2 per parameter that a token is multiplied with.

        A SPIRe draft projects a second time to keys and values, of the memory vector, with weights that the
        pass has read already.
        """
        layer = self.attention_parameters + self.num_active_experts * self.expert_parameters
        layer += self.key_value_parameters if self.is_spire else 0
        return 2 * (self.num_layers * layer + self.vocab_size * self.hidden_size)

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.kv_bytes

    def kv_share(self, context: float) -> float:
        """Of a context's tokens, what an average layer reads and, in vLLM's hybrid KV cache, keeps."""
        if not self.num_window_layers:
            return 1.0
        near = self.num_window_layers / self.num_layers
        return 1 - near + near * min(1.0, self.window / max(1, context))


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the family's configurations leave out that embeddings are shared, because they always are."""
    return str(config.get("model_type")).startswith(("gemma", "cohere"))


# Families whose configurations say by number which layers see the whole context: every so many.
_FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "llama4_text": 4}


def _windows(config: Mapping[str, Any]) -> dict[str, int]:
    """`num_window_layers` and `window`."""
    tokens = _first(config, "sliding_window", "attention_chunk_size")
    if not tokens or config.get("use_sliding_window") is False:
        return {}
    layers = config["num_hidden_layers"]
    usual = _FULL_ATTENTION_EVERY.get(str(config.get("model_type")))
    every = _first(config, "sliding_window_pattern") or usual
    if types := config.get("layer_types"):
        near = sum(kind != "full_attention" for kind in types)
    elif every:
        near = layers - layers // every
    else:
        near = layers - config.get("max_window_layers", 0)  # Qwen2's first ones see everything
    return {"num_window_layers": near, "window": tokens}


def _weight_bytes(config: Mapping[str, Any]) -> float:
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4":
        return 4.25 / 8  # of the experts, which are most of it
    if quantization.get("quant_method") == "fp8":
        return 1.0
    if "bits" in quantization:
        return float(quantization["bits"]) / 8
    if quantization:
        raise ValueError(
            f"the weight size of quantization {quantization.get('quant_method')!r} is not known; "
            "say the bytes per weight"
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return _DTYPE_BYTES.get(str(dtype), 2.0)
