# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's interfaces; a new version of vLLM changes this subpackage first.

`hooks.py` lists the attributes to wrap and `requirements.py` the other names that the plugin needs.
`runner_v1.py` and `runner_v2.py` put the draft loop into vLLM's model runners, with what both share in
`draft_runner.py`; `draft_models_v1.py` and `draft_models_v2.py` run draft models in place of the target.
Files that begin with `cpu_` fix vLLM on CPUs.
"""
