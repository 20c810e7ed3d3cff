# SPDX-License-Identifier: Apache-2.0
"""Drafts beside a KV connector (`--kv-transfer-config`, `--kv-offloading-size`).

A connector saves and sends verified tokens only, and drafts write only after these. It must not see draft
passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
