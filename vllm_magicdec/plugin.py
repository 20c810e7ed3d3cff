# SPDX-License-Identifier: Apache-2.0
"""The entry point of the plugin: vLLM calls `register` in every process, possibly several times.

`register` never raises: vLLM propagates exceptions of plugins, which would break every command of the
environment. Modules that need vLLM are therefore imported inside functions.
"""

import dataclasses
import inspect
import logging
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from vllm_magicdec import TESTED_VLLM_VERSIONS, __version__, hooking
from vllm_magicdec.errors import METHOD, MODEL_METHOD

logger = logging.getLogger(f"vllm.{__name__}")

REGISTRY = "vllm.v1.spec_decode.registry"  # the patch in patches/ adds it to vLLM

# The fields of its SpeculativeMethodSpec.
_SPEC = {
    "config_cls": "vllm_magicdec.vllm_api.engine_config.EngineSpeculativeConfig",
    "proposer_cls": "vllm_magicdec.vllm_api.draft_models_v1.make_proposer",
    "speculator_cls": "vllm_magicdec.vllm_api.draft_models_v2.make_speculator",
    "add_cli_args": "vllm_magicdec.vllm_api.options.add_options",
    "reads_aux_hidden_states": "vllm_magicdec.vllm_api.engine_config.reads_activations",
}


def register() -> str | None:
    """Register the methods with the installed vLLM, or leave vLLM unchanged and log the reason in one line.

    In the second case, requests for one of the methods fail with the same sentence, which is returned.
    """
    from vllm_magicdec.vllm_api import unavailable

    try:
        hooking.uninstall(unavailable.HOOKS)
        _register()
    except Exception as error:
        hooking.uninstall()
        version = _vllm_version()
        reason = (
            f"vllm-magicdec {__version__} is off because vLLM {version} is not supported "
            f"({hooking.in_words(error)}); install vLLM {' or '.join(TESTED_VLLM_VERSIONS)}, or a version "
            f"of vllm-magicdec for vLLM {version}"
        )
        unavailable.explain(reason)
        logger.warning("%s.", reason)
        return reason
    return None


def _register() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_magicdec.spire.settings import ARCHITECTURE
    from vllm_magicdec.vllm_api import hooks
    from vllm_magicdec.vllm_api.requirements import REQUIRED

    registry = _find_registry()
    chosen = hooks.HOOKS if registry is None else hooks.HOOKS_BESIDE_REGISTRY
    hooking.check((*chosen, *REQUIRED))
    hooking.install(chosen)
    if registry is not None:
        spec = registry.SpeculativeMethodSpec(**_SPEC)
        for method in (METHOD, MODEL_METHOD):
            registry.register_speculative_method(method, spec)
    # A name instead of the class: only engines with a SPIRe draft import the module.
    ModelRegistry.register_model(
        ARCHITECTURE, "vllm_magicdec.vllm_api.spire_model:MagicDecSpireForCausalLM"
    )
    version = _vllm_version()
    if version.split("+")[0] not in TESTED_VLLM_VERSIONS:
        logger.warning(
            "vllm-magicdec was tested with vLLM %s, not with %s.", ", ".join(TESTED_VLLM_VERSIONS), version
        )


def _find_registry() -> ModuleType | None:
    """Return the registry of patches/, or None if vLLM has none or another one."""
    if find_spec(REGISTRY) is None:
        return None
    registry = import_module(REGISTRY)
    function = getattr(registry, "register_speculative_method", None)
    spec = getattr(registry, "SpeculativeMethodSpec", None)
    if not callable(function) or not dataclasses.is_dataclass(spec):
        return None
    takes = list(inspect.signature(function).parameters)
    fields = {field.name for field in dataclasses.fields(spec)}
    return registry if takes == ["name", "spec"] and fields == _SPEC.keys() else None


def _vllm_version() -> str:
    return getattr(import_module("vllm"), "__version__", "of an unknown version")
