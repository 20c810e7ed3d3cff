# SPDX-License-Identifier: Apache-2.0
"""Thin adapters between the draft loop and vLLM's two model runners."""
