# SPDX-License-Identifier: Apache-2.0
"""The entry point: vLLM calls `register` in every process that it starts, possibly several times."""

import vllm
from vllm.logger import init_logger

from vllm_magicdec import hooks

logger = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Teach the installed vLLM the method `magicdec-self`.

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
    hooks.install()
