# SPDX-License-Identifier: Apache-2.0
"""Engine configurations as on a CUDA device, created by vLLM's own code."""

import engines
import pytest
from small_models import write_llama
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_magicdec.errors import METHOD
from vllm_magicdec.plugin import register


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Returns a function that creates engine configurations with CUDA graphs and the V2 runner."""
    write_llama(tmp_path)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)

    def make(speculative_config, **engine):
        arguments = {"skip_tokenizer_init": True, "max_model_len": 4096, "block_size": 32, **engine}
        return EngineArgs(
            model=str(tmp_path), speculative_config=speculative_config, **arguments
        ).create_engine_config()

    return make


@pytest.fixture(scope="session")
def configure_tiny():
    register()

    def make(**speculative):
        engine = {"skip_tokenizer_init": True, "max_model_len": 2048, "block_size": 32}
        spec = {"method": METHOD, "num_speculative_tokens": 2, **speculative}
        return EngineArgs(str(engines.MODEL), speculative_config=spec, **engine).create_engine_config()

    return make


@pytest.fixture
def capture(monkeypatch):
    """Returns a function that creates vLLM's graph manager of the target, without capturing."""
    rank = type("Rank", (), {"is_first_rank": True, "is_last_rank": True})
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda *_: None, raising=False)

    def make(config):
        mode, query_len = config.compilation_config.cudagraph_mode, config.num_speculative_tokens + 1
        manager = cudagraph_utils.CudaGraphManager(config, "cuda", mode, decode_query_len=query_len)
        manager._graphs_captured = True
        return manager

    return make
