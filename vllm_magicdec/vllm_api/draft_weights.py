# SPDX-License-Identifier: Apache-2.0
"""A copy of the target with quantised linear layers, over the target's own KV cache (`draft_weights`).

The copy has the target's structure. Linear layers get quantised copies of the target's weights: on GPUs by
vLLM's online quantisation, on CPUs by `native/quantised_linear.py`, there also the unembedding. Everything
else is the target's: embeddings, norms and above all the attention layers, so that the copy reads and
writes the target's KV cache. After an update of the target's weights they are quantised again.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES, QuantizationConfigArgs
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.native.library import UnreadableError, find_kernel
from vllm_magicdec.native.quantised_linear import BITS, pack
from vllm_magicdec.vllm_api.calibration import mean_squares_of_inputs

logger = init_logger(f"vllm.{__name__}")

_UNQUANTISED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_ROWS_AT_ONCE = 256  # of the identity, to bound the memory of its products


def check_draft_weights(weights: str, vllm_config: VllmConfig) -> None:
    """Refuse a value of `draft_weights` that this engine does not support.

    Raises:
        MagicDecConfigError: says what to use instead.
    """
    name, model = f"{METHOD}: draft_weights={weights!r}", vllm_config.model_config
    instead = "use draft_weights='target'"
    if model.quantization is not None:
        raise MagicDecConfigError(
            f"{name} is not possible because the target is quantised ({model.quantization}); {instead}"
        )
    if model.is_moe:
        raise MagicDecConfigError(f"{name} is not supported for mixture-of-experts models; {instead}")
    if model.supports_multimodal_inputs or model.enable_prompt_embeds or model.uses_mrope:
        raise MagicDecConfigError(
            f"{name} is only supported for models whose input is text; {instead}, or serve text alone "
            "(--limit-mm-per-prompt with 0 of everything, without --enable-prompt-embeds)"
        )
    if vllm_config.lora_config is not None:
        raise MagicDecConfigError(
            f"{name} does not work with LoRA, whose adapters the copy does not have; {instead}, or remove "
            "--enable-lora"
        )
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise MagicDecConfigError(
            f"{name} does not work with weights that vLLM offloads; {instead}, or remove --cpu-offload-gb "
            "and --offload-group-size"
        )
    is_cpu = vllm_config.device_config.device_type == "cpu"
    possible = (
        sorted(BITS) if is_cpu else list(filter(_quantises_linear_layers, ONLINE_QUANT_SHORTHAND_NAMES))
    )
    if weights not in possible:
        names = ", ".join(map(repr, ("target", *possible)))
        raise MagicDecConfigError(
            f"{name} is not one of those that this device supports; use one of {names}"
        )
    if is_cpu:
        try:
            find_kernel()
        except UnreadableError as error:
            raise MagicDecConfigError(f"{name} is not possible here: {error}; {instead}") from None
    elif model.dtype == torch.float32:
        raise MagicDecConfigError(f"{name} needs --dtype bfloat16 or float16 on GPUs; {instead}")


def _quantises_linear_layers(name: str) -> bool:
    try:
        return _online_config(name).resolve_quant_method_cls(LinearBase, "") is not None
    except ValueError:  # it quantises experts alone
        return False


def _online_config(name: str) -> OnlineQuantizationConfig:
    return OnlineQuantizationConfig(QuantizationConfigArgs(linear=name))  # type: ignore[arg-type]  # pydantic converts


class QuantisedCopy:
    """The copy of a target, `model`, and the quantisation of its weights.

    Args:
        target: the target, with its weights loaded.
        vllm_config: the engine's configuration.
        weights: value of `draft_weights` other than `target`.
        device: the target's device.

    Raises:
        MagicDecConfigError: vLLM cannot build or quantise a copy of this model here.
    """

    def __init__(
        self, target: nn.Module, vllm_config: VllmConfig, weights: str, device: torch.device
    ) -> None:
        self._target, self._vllm_config, self._weights = target, vllm_config, weights
        name = f"{METHOD}: draft_weights={weights!r}"
        config = _copied_config(vllm_config, weights)
        try:
            with (
                set_default_torch_dtype(vllm_config.model_config.dtype),
                set_model_tag("draft_model"),
                torch.device("meta"),
            ):
                self.model = initialize_model(config)
            # Pairs of a quantised layer and the target's layer.
            self._pairs = list(_share(self.model, target))
            with set_default_torch_dtype(vllm_config.model_config.dtype), device:
                importance = self._importance()
                for layer, original in self._pairs:
                    _quantise(layer, original, importance.get(original))
        except (ValueError, RuntimeError) as error:
            # vLLM has no kernel for the shapes or the device, or the model's constructor reads tensors.
            reason = " ".join(str(error).split())
            raise MagicDecConfigError(
                f"{name} is not possible for {type(target).__name__} here ({reason}); use another value, "
                "or 'target'"
            ) from error
        # vLLM's compiler and passes find the layers that attend.
        config.compilation_config.static_forward_context.update(
            vllm_config.compilation_config.static_forward_context
        )
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        missing = next((name for name, tensor in tensors if tensor.is_meta), None)
        if missing is not None or not self._pairs:
            raise MagicDecConfigError(
                f"{name} is not supported for {type(target).__name__} ({missing or 'no linear layers'}); "
                "use draft_weights='target'"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Quantise the target's weights again, in the same memory, which CUDA graphs refer to."""
        importance = self._importance()
        for layer, original in self._pairs:
            kept = {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}
            try:
                _quantise(layer, original, importance.get(original))
                for name, tensor in kept.items():
                    tensor.data.copy_(layer._parameters[name])
            finally:
                layer._parameters.update(kept)

    def _importance(self) -> dict[nn.Module, torch.Tensor]:
        """Return what `pack` takes beside the weights, by layer of the target."""
        if BITS.get(self._weights) != 4:
            return {}
        layers = [original for _, original in self._pairs if isinstance(original, LinearBase)]
        try:
            return mean_squares_of_inputs(self._target, self._vllm_config, layers)
        except Exception:  # weights of 4 bits do without
            logger.warning("%s: the inputs of the target could not be measured", METHOD, exc_info=True)
            return {}


def _copied_config(vllm_config: VllmConfig, weights: str) -> VllmConfig:
    """Return the configuration of a copy, whose layers have the names of the target's."""
    config = copy.copy(vllm_config)
    is_cpu = vllm_config.device_config.device_type == "cpu"
    config.quant_config = PackedConfig(BITS[weights]) if is_cpu else _online_config(weights)
    config.model_config = copy.copy(vllm_config.model_config)
    # Part of the key of vLLM's cache of compiled code.
    config.model_config.quantization = weights
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config


def _is_quantised(module: nn.Module) -> bool:
    is_weighted = isinstance(module, LinearBase | VocabParallelEmbedding)
    return is_weighted and type(module.quant_method) not in _UNQUANTISED


def _share(own: nn.Module, target: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Replace modules and tensors of a copy by the target's; yield the layers to quantise in pairs."""
    for name in own._parameters:
        own._parameters[name] = target._parameters[name]
    for name in own._buffers:
        own._buffers[name] = target._buffers[name]
    for name, value in vars(own).items():
        if isinstance(value, torch.Tensor):
            setattr(own, name, getattr(target, name))
    for name, child in own._modules.items():
        original = target._modules[name]
        if child is None or original is None:
            continue
        if _is_quantised(child):
            yield child, original
        elif any(map(_is_quantised, child.modules())):
            yield from _share(child, original)
        else:
            own._modules[name] = original


@torch.no_grad()
def _quantise(layer: nn.Module, original: nn.Module, importance: torch.Tensor | None) -> None:
    """Give a layer the quantised weights of the target's layer; `importance` is that of `pack`."""
    layer.importance = importance
    layer.register_parameter("weight", nn.Parameter(_weights_of(original), requires_grad=False))
    # Some of vLLM's kernels replace it by a permuted copy.
    layer.register_parameter("bias", original._parameters.get("bias"))
    # Set by vLLM's methods, which then ignore further calls.
    vars(layer).pop("_already_called_process_weights_after_loading", None)
    layer.quant_method.process_weights_after_loading(layer)


def _weights_of(layer: Any) -> torch.Tensor:
    """Return the weights of the target's layer, [out_features, in_features]."""
    weight: torch.Tensor = layer.weight.data
    if weight.numel():
        return weight
    # On CPUs vLLM packs them and drops the tensor. The product with the identity returns them exactly.
    in_features = layer.input_size_per_partition
    rows = torch.eye(in_features, dtype=layer.params_dtype).split(_ROWS_AT_ONCE)
    products = [layer.quant_method.apply(layer, part, None) for part in rows]
    return torch.cat(products).t().contiguous()


class PackedConfig(QuantizationConfig):
    """vLLM's description of weights of 4 or 8 bits on CPUs (`native/quantised_linear.py`)."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    @override
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return PackedLinear(self.bits)
        return PackedUnembedding() if isinstance(layer, ParallelLMHead) else None

    @override
    def get_name(self) -> Any:
        return "magicdec"

    @override
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    @override
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    @override
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    @override
    def from_config(cls, config: dict[str, Any]) -> "PackedConfig":
        raise NotImplementedError("no checkpoint has these weights")


class _Packed(QuantizeMethodBase):
    """A layer with packed weights."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        packed = pack(layer.weight, self._bits, layer.importance)
        layer.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
        layer.out_features = layer.weight.shape[0]

    @override
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.vllm_magicdec.multiply(rows, layer.packed, layer.out_features, self._bits)
        product = product.view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


class PackedLinear(_Packed, LinearMethodBase):
    """A linear layer with packed weights alone."""

    @override
    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        layer.register_parameter("weight", None)  # `_quantise` sets it

    @override
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.register_parameter("weight", None)


class PackedUnembedding(_Packed, UnquantizedEmbeddingMethod):
    """An unembedding with 8 bits, beside the target's own weights; 4 bits change too many drafts."""

    def __init__(self) -> None:
        super().__init__(bits=8)
