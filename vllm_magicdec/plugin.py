# SPDX-License-Identifier: Apache-2.0
"""The entry point: vLLM calls `register` in every process that it starts, possibly several times.

It never raises: vLLM lets a plugin's exception through, and then no command of that environment starts.
Modules that need vLLM are therefore imported inside functions.
"""

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from vllm_magicdec import TESTED_VLLM_VERSIONS, __version__
from vllm_magicdec.errors import METHOD, MODEL_METHOD

logger = logging.getLogger(f"vllm.{__name__}")

REGISTRY = "vllm.v1.spec_decode.registry"  # added to vLLM by patches/

_PARTS = {
    "config_cls": "vllm_magicdec.vllm_api.engine_config:EngineSpeculativeConfig",
    "proposer_cls": "vllm_magicdec.vllm_api.runner_v1:MagicDecProposer",
    "speculator_cls": "vllm_magicdec.vllm_api.runner_v2:MagicDecSpeculator",
    "add_cli_args": "vllm_magicdec.vllm_api.options:add_options",
}


def register() -> None:
    """Teach the installed vLLM our methods, or leave it as it was and log why in one line.

    In the second case asking for one of the methods gives the same sentence as an error.
    """
    try_to_register()


def try_to_register() -> str | None:
    """Register the methods; returns the reason if this vLLM cannot have them, which is then logged."""
    from vllm_magicdec.vllm_api import hook, unavailable

    try:
        hook.uninstall(unavailable.HOOKS)
        _register()
    except Exception as error:
        hook.uninstall()
        version = _vllm_version()
        reason = (
            f"vllm-magicdec {__version__} is off because vLLM {version} is not what it needs "
            f"({hook.in_words(error)}); install vLLM {' or '.join(TESTED_VLLM_VERSIONS)}, or a version of "
            f"vllm-magicdec for vLLM {version}"
        )
        unavailable.explain(reason)
        logger.warning("%s.", reason)
        return reason
    return None


def _register() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_magicdec.spire.settings import ARCHITECTURE
    from vllm_magicdec.vllm_api import hook, hooks
    from vllm_magicdec.vllm_api.requirements import REQUIRED

    register_method = _find_registry()
    chosen = hooks.HOOKS if register_method is None else hooks.BESIDE_REGISTRY
    hook.check((*chosen, *REQUIRED))
    hook.install(chosen)
    if register_method is not None:
        for method in (METHOD, MODEL_METHOD):
            register_method(method, **_PARTS)
    # By name: who serves nothing of the kind need not load it.
    ModelRegistry.register_model(
        ARCHITECTURE, "vllm_magicdec.vllm_api.spire_model:MagicDecSpireForCausalLM"
    )
    version = _vllm_version()
    if version.split("+")[0] not in TESTED_VLLM_VERSIONS:
        logger.warning(
            "vllm-magicdec was tested with vLLM %s, not with %s.", ", ".join(TESTED_VLLM_VERSIONS), version
        )


def _find_registry() -> Callable[..., None] | None:
    """The registering function of patches/; None: this vLLM has none, or a registry of another shape."""
    if find_spec(REGISTRY) is None:
        return None
    function = getattr(import_module(REGISTRY), "register_speculative_method", None)
    if function is None:
        return None
    signature = inspect.signature(function)
    try:
        signature.bind(METHOD, **_PARTS)
    except TypeError:
        return None
    return function if _PARTS.keys() <= signature.parameters.keys() else None


def _vllm_version() -> str:
    return getattr(import_module("vllm"), "__version__", "of an unknown version")
