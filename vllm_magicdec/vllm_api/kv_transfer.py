# SPDX-License-Identifier: Apache-2.0
"""Drafts beside a KV connector (`--kv-transfer-config`, `--kv-offloading-size`).

What a connector saves or sends is exact: drafts write behind the last verified token only, and a connector
knows of no token before it is verified. Two things are left to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state


@contextmanager
def unseen_by_connector() -> Iterator[None]:
    """Passes within are not shown to the connector.

    vLLM has one wait for and save every layer's K/V from within its attention, once per step. A draft runs
    the same layers: the connector would save and send them again, or count more layers than there are.
    """
    # As vLLM does for its own dummy passes (`ActiveKVConnector.set_disabled`).
    connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = connector


def fills_freed_blocks(vllm_config: VllmConfig) -> bool:
    """Whether a connector may write to a request's blocks as soon as the scheduler has its last tokens.

    Such writes need not be ordered after what the GPU still computes, so vLLM frees no block before it has
    the output of every step that uses it.
    """
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.is_kv_consumer
