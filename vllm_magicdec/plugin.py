# SPDX-License-Identifier: Apache-2.0
"""The entry point: vLLM calls `register` in every process that it starts, possibly several times."""

from importlib.util import find_spec

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry

from vllm_magicdec.errors import METHOD, MODEL_METHOD
from vllm_magicdec.spire.settings import ARCHITECTURE
from vllm_magicdec.vllm_api import hooks

logger = init_logger(f"vllm.{__name__}")

REGISTRY = "vllm.v1.spec_decode.registry"  # added to vLLM by patches/


def register() -> None:
    """Teach the installed vLLM our methods: by its registry and few hooks, or else by hooks.

    Raises:
        MagicDecConfigError: the installed vLLM lacks what the plugin needs.
    """
    version = vllm.__version__.split("+")[0]
    if version not in hooks.TESTED_VLLM_VERSIONS:
        logger.warning_once(
            "vllm-magicdec was tested with vLLM %s, not with %s.",
            ", ".join(hooks.TESTED_VLLM_VERSIONS),
            vllm.__version__,
        )
    # By name: who serves nothing of the kind need not load it.
    ModelRegistry.register_model(
        ARCHITECTURE, "vllm_magicdec.vllm_api.spire_model:MagicDecSpireForCausalLM"
    )
    if find_spec(REGISTRY) is None:
        hooks.install()
        return
    from vllm.v1.spec_decode.registry import register_speculative_method

    hooks.install(hooks.BESIDE_REGISTRY)
    for method in (METHOD, MODEL_METHOD):
        register_speculative_method(
            method,
            config_cls="vllm_magicdec.vllm_api.engine_config:EngineSpeculativeConfig",
            proposer_cls="vllm_magicdec.vllm_api.runner_v1:MagicDecProposer",
            speculator_cls="vllm_magicdec.vllm_api.runner_v2:MagicDecSpeculator",
            add_cli_args="vllm_magicdec.vllm_api.options:add_options",
        )
