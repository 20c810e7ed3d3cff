# SPDX-License-Identifier: Apache-2.0
"""Where the supported versions of vLLM differ: a module for each difference and version.

To drop a version, delete its modules and their lines here.
"""

from importlib.util import find_spec

if find_spec("vllm.v1.core.kv_cache_planning") is None:
    from vllm_magicdec.vllm_api import kv_planning_032 as kv_planning
else:
    from vllm_magicdec.vllm_api import kv_planning_033 as kv_planning  # type: ignore[no-redef]

__all__ = ["kv_planning"]
