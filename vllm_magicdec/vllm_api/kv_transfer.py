# SPDX-License-Identifier: Apache-2.0
"""Drafts beside a KV connector (`--kv-transfer-config`, `--kv-offloading-size`).

A connector saves and sends verified tokens only, and drafts write only after these. It must not see draft
passes, and it must not write to blocks that drafting still uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state


@contextmanager
def without_kv_connector() -> Iterator[None]:
    """Hide forward passes from the KV connector.

    Once per step, vLLM's attention layers let the connector wait for and save their K/V. In a draft pass
    the same layers would save again, or the connector would count too many layers.
    """
    # As vLLM does for its own dummy passes (`ActiveKVConnector.set_disabled`).
    connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = connector


def fills_freed_blocks(vllm_config: VllmConfig) -> bool:
    """Whether a connector may write to a request's blocks as soon as the scheduler frees them.

    Such writes are not ordered after the GPU's work, so vLLM frees no block before it has the output of
    every step that uses it.
    """
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.is_kv_consumer
