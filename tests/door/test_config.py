# SPDX-License-Identifier: Apache-2.0
"""Configurations of self-speculation are resolved; errors are one sentence before any model is loaded."""

import copy
import json
import pickle

import pytest
from small_models import SIZES
from transformers import MambaConfig, MixtralConfig, T5Config
from vllm.config import ParallelConfig
from vllm.config.compilation import CompilationConfig, PassConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register
from vllm_magicdec.policies import find_policy
from vllm_magicdec.vllm_api.draft_weights import check_draft_weights
from vllm_magicdec.vllm_api.engine_config import EngineSpeculativeConfig

register()


def configure(model_dir, speculative_config, **engine):
    """Build the engine configuration as `vllm serve` and `LLM` do."""
    args = {"skip_tokenizer_init": True, "max_model_len": 4096, "block_size": 32, **engine}
    return EngineArgs(model=model_dir, speculative_config=speculative_config, **args).create_engine_config()


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"method": METHOD}, {}),
        ({"model": METHOD}, {}),
        ({"method": METHOD, "model": METHOD}, {}),
        (None, {"spec_method": METHOD}),
        (None, {"spec_model": METHOD, "spec_tokens": 4}),
    ],
)
def test_method_or_model_selects_magicdec(model_dir, fields, engine):
    spec = configure(model_dir, fields, **engine).speculative_config
    assert type(spec) is EngineSpeculativeConfig
    assert spec.num_speculative_tokens == 4
    assert (spec.draft_kv_policy, spec.draft_kv_budget, spec.draft_kv_sink) == ("streamingllm", 512, 4)
    assert spec.draft_model_config is spec.target_model_config


def test_scheduler_reserves_only_lookahead_tokens(model_dir):
    config = configure(model_dir, {"method": METHOD, "num_speculative_tokens": 5})
    assert config.speculative_config.uses_draft_model()
    assert config.num_lookahead_tokens == 5
    assert config.speculative_config.max_num_new_slots_for_drafting == 0
    plain = configure(model_dir, None)
    assert config.scheduler_config.async_scheduling == plain.scheduler_config.async_scheduling


def test_configuration_survives_copies(model_dir):
    config = configure(model_dir, {"method": METHOD, "draft_kv_budget": 0.25, "draft_kv_sink": 64})
    spec = config.speculative_config
    for copied in (pickle.loads(pickle.dumps(config)).speculative_config, copy.copy(spec), replace(spec)):
        assert type(copied) is EngineSpeculativeConfig
        assert repr(copied) == repr(spec)


def test_auto_uses_lookups_where_supported(model_dir):
    auto = {"method": METHOD, "num_speculative_tokens": "auto"}

    def spec_of(fields):
        return configure(model_dir, fields).speculative_config

    spec = spec_of(auto)
    assert (spec.draft_lookup, spec.num_speculative_tokens, spec.lengths) == ("on", 16, (0, 16))
    again = replace(spec)
    assert (again.draft_lookup, again.num_speculative_tokens, again.lengths) == ("on", 16, (0, 16))
    assert spec_of({**auto, "max_num_speculative_tokens": 6}).lengths == (0, 6)
    assert spec_of({**auto, "draft_lookup": "off"}).num_speculative_tokens == 8
    assert spec_of({"method": METHOD, "num_speculative_tokens": 4}).draft_lookup == "off"
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    assert spec_of({**auto, **synthetic}).num_speculative_tokens == 8
    assert spec_of({**auto, "draft_lookup_sources": "served"}).draft_lookup_sources == ("served",)


@pytest.mark.parametrize("engine", [{}, {"async_scheduling": False}, {"data_parallel_size": 2}])
def test_auto_sets_scheduler_and_lengths(model_dir, engine):
    fields = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 6, "draft_lookup": "off"}
    config = configure(model_dir, {"method": METHOD, **fields}, **engine)
    spec = config.speculative_config
    assert spec.num_speculative_tokens == config.num_lookahead_tokens == 6
    lookup = build_dynamic_sd_schedule_lookup(spec.num_speculative_tokens_per_batch_size, 64, 6)
    assert set(lookup[1:]) == set(range(7))
    scheduler = config.scheduler_config.get_scheduler_cls()
    assert scheduler.__name__.startswith("MagicDec")
    assert issubclass(scheduler, AsyncScheduler) == config.scheduler_config.async_scheduling
    assert repr(replace(spec)) == repr(pickle.loads(pickle.dumps(spec))) == repr(spec)


def test_profile_of_another_budget_is_refused(model_dir, tmp_path):
    path = tmp_path / "profile.json"
    StepTimes([TimedStep(Step(1, 100, 0, 2, 256), 0.01)]).save(path, {})
    fields = {"method": METHOD, "num_speculative_tokens": "auto", "profile": str(path)}
    with pytest.raises(MagicDecConfigError, match="draft_kv_budget=256, not 512; use a measured"):
        configure(model_dir, fields)
    configure(model_dir, {**fields, "draft_kv_budget": 256})


def test_auto_is_refused_if_ranks_must_choose_the_same(model_dir, tmp_path, monkeypatch):
    fields = {"method": METHOD, "num_speculative_tokens": "auto"}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM changes it for the whole process
    monkeypatch.setenv("RANK", "0")
    launcher = {"distributed_executor_backend": "external_launcher"}
    with pytest.raises(MagicDecConfigError, match="'external_launcher' all processes must choose the same"):
        configure(model_dir, fields, **launcher, tensor_parallel_size=2)
    configure(model_dir, fields, **launcher)
    for drafts in ("auto", 4):
        with pytest.raises(MagicDecConfigError, match="its ranks meet in every pass"):
            configure(
                model_dir, {**fields, "num_speculative_tokens": drafts}, **launcher, data_parallel_size=2
            )
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = MixtralConfig(architectures=["MixtralForCausalLM"], num_hidden_layers=2, **SIZES, **experts)
    config.save_pretrained(tmp_path)
    with pytest.raises(MagicDecConfigError, match="data parallelism is not supported for mixture-of"):
        configure(str(tmp_path), fields, data_parallel_size=2)


def test_arguments_can_be_resolved_again(model_dir):
    """API servers and Ray do this; vLLM adds the options to the speculative config."""
    given = {"speculative_config": {"draft_kv_budget": 256}, "spec_model": METHOD, "spec_tokens": "auto"}
    args, again = (
        EngineArgs(model=model_dir, skip_tokenizer_init=True, max_model_len=4096, **given) for _ in range(2)
    )
    for arguments in (args, args, again):
        spec = arguments.create_engine_config().speculative_config
        assert type(spec) is EngineSpeculativeConfig
        assert (spec.adaptive, spec.draft_kv_budget) == (True, 256)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"draft_kv_budget": 64}, "draft_kv_budget belongs to method='magicdec-self'; add that"),
        ({"draft-kv-budget": 64}, "draft_kv_budget belongs to method='magicdec-self'; add that"),
        ({"num_speculative_tokens": "auto"}, "='auto' belongs to method='magicdec-self'; add that"),
        ({"model": "org/draft", "draft_lookup": "on"}, "belongs to method='magicdec'; add that"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft_lookup": "on"}, "or remove draft_lookup"),
        ({"method": "magicdec_self", "draft_kv_budget": 64}, "did you mean 'magicdec-self'?"),
        ({"method": "eagle", "model": METHOD, "num_speculative_tokens": 2}, "remove method='eagle'"),
    ],
)
def test_fields_without_their_method_get_one_sentence(model_dir, fields, sentence):
    with pytest.raises(MagicDecConfigError) as error:
        configure(model_dir, fields)
    assert str(error.value).endswith(sentence)


ADAPTERS = {"enable_lora": True, "max_num_seqs": 256, "max_num_batched_tokens": 1024}
ADAPTIVE = {"enable_adaptive_verification": True}


@pytest.mark.parametrize(
    ("max_num_seqs", "drafts"),
    [(256, 3), (512, 1), (100, 9), (16, 16)],  # 16: the default with lookups
)
def test_auto_drafts_what_a_step_with_adapters_has_room_for(model_dir, max_num_seqs, drafts):
    given = {"method": METHOD, "num_speculative_tokens": "auto"}
    engine = {**ADAPTERS, "max_num_seqs": max_num_seqs}
    spec = configure(model_dir, given, **engine).speculative_config
    assert spec.num_speculative_tokens == drafts and spec.lengths == (0, drafts)
    options = configure(model_dir, None, spec_model=METHOD, spec_tokens="auto", **engine)
    assert repr(options.speculative_config) == repr(spec)


def test_other_errors_of_engines_with_adapters_stay_vllms(model_dir):
    twice = {"attention_backend": "FLASH_ATTN", "attention_config": {"backend": "FLASH_ATTN"}}
    with pytest.raises(ValueError, match="mutually exclusive"):
        configure(model_dir, {"method": METHOD, "num_speculative_tokens": 1}, **ADAPTERS, **twice)


AUTO = {"num_speculative_tokens": "auto"}
BY_TOKEN = {"draft_kv_granularity": "token"}
SNAPKV = {"draft_kv_policy": "snapkv"}
TOPK = {"draft_kv_policy": "verify-topk"}
FUSED = {"compilation_config": CompilationConfig(pass_config=PassConfig(fuse_attn_quant=True))}
# Fields, options of the engine, and a part of the sentence; "!" marks its end.
REFUSED = [
    ({**SNAPKV, "snapkv_window": 1000}, {}, "values nearer to the defaults snapkv_window=16!"),
    ({**SNAPKV, "snapkv_window": 300, "draft_kv_sink": 200}, {}, "draft_kv_sink=4, snapkv_window=16!"),
    ({**TOPK, "draft_kv_sink": 2000}, {}, "values nearer to the defaults draft_kv_sink=4!"),
    ({**TOPK, **AUTO, "draft_kv_budget": 160, "max_num_speculative_tokens": 128}, {}, "tokens=16!"),
    ({**TOPK, "draft_kv_budget": 128}, {}, "use at least 160, or a smaller --block-size"),
    ({"draft_kv_bugdet": 512}, {}, "did you mean 'draft_kv_budget'?"),
    ({"draft_kv_budget": "many"}, {}, "use a number of tokens, or a fraction of the context such as 0.06!"),
    ({"num_speculative_tokens": 0}, {}, "use 1 to 128 or 'auto', or leave speculation out!"),
    ({"draft_kv_policy": "h2o"}, {}, "'h2o' is unknown; use one of streamingllm, snapkv, verify-topk"),
    ({"snapkv_kernel": 6}, {}, "snapkv_kernel=6 is even; use 7"),
    ({"draft_kv_budget": 20}, {}, "is below one KV page of 32 tokens; use at least 32"),
    ({"draft_kv_budget": 5000}, {}, "above the model length; use at most 4096"),
    ({"draft_kv_budget": 0.5, "draft_kv_min_budget": 8}, {}, "draft_kv_min_budget=8 is below one KV page"),
    ({"quantization": "fp8"}, {}, "has no use for 'quantization'"),
    ({"model": "org/draft"}, {}, "remove model='org/draft'"),
    ({"max_num_speculative_tokens": 6}, {}, "belongs to num_speculative_tokens='auto'"),
    ({"draft_kv_cache": "whole"}, {}, "draft_kv_cache is no longer supported; remove it: "),
    ({"profile": "p.json"}, {}, "belongs to num_speculative_tokens='auto'; add that"),
    ({**AUTO, "profile": "/tmp"}, {}, "profile: /tmp is not a profile written by 'magicdec profile'"),
    ({**AUTO, "num_speculative_tokens_per_batch_size": [(1, 8, 2)]}, {}, "leaves no use for"),
    ({"draft_lookup": "off", "draft_lookup_sources": ["served"]}, {}, "use one of them or remove it"),
    ({"draft_lookup_sources": []}, {}, "draft_lookup_sources is empty; name 'context', 'served' or"),
    ({"draft_lookup_sources": ["context"] * 2}, {}, "names a source twice; remove one of them"),
    ({"draft_lookup_sources": ["context", "/no/such/store"], "draft_lookup": "on"}, {}, "/no/such/store"),
    ({"rejection_sample_method": "fly"}, {}, "rejection_sample_method='fly' "),
    ({"rejection_sample_method": "synthetic"}, {}, "requires exactly one of"),
    ({**TOPK, **BY_TOKEN}, {}, "not supported by draft_kv_policy='verify-topk'; remove it or use 'page'"),
    (BY_TOKEN, {}, "is not supported by draft_kv_policy='streamingllm'; remove it"),
    ({**SNAPKV, **BY_TOKEN}, FUSED, "use -cc.pass_config.fuse_attn_quant=False, or"),
    (ADAPTIVE, {}, "enable_adaptive_verification needs a GPU; remove it"),
    ({**ADAPTIVE, **AUTO}, {}, "needs a fixed num_speculative_tokens, as 'auto'"),
    (AUTO, {"scheduler_cls": "some.Scheduler"}, "remove --scheduler-cls"),
    ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
    ({}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "context parallelism"),
    ({"num_speculative_tokens": 4}, ADAPTERS, "use num_speculative_tokens=3, --max-num-seqs 204, or"),
    ({**AUTO, "max_num_speculative_tokens": 6}, ADAPTERS, "use max_num_speculative_tokens=3, "),
    (AUTO, {**ADAPTERS, "max_num_seqs": 600}, "use --max-num-seqs 512, or --max-num-batched-tokens 1200"),
    ({"draft_weights": "int3"}, {}, "use one of 'target', 'int4', 'int8'"),
    ({"draft_weights": "fp8_per_tensor"}, {}, "use one of 'target', 'int4', 'int8'"),
    ({"draft_weights": "int8"}, {"enable_lora": True}, "does not work with LoRA"),
    ({"draft_weights": "int8"}, {"enable_prompt_embeds": True}, "only supported for models whose input is"),
]


@pytest.mark.parametrize(("fields", "engine", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(model_dir, fields, engine, sentence):
    with pytest.raises(MagicDecConfigError) as error:
        configure(model_dir, {"method": METHOD, **fields}, **engine)
    assert sentence in f"{error.value}!" and "\n" not in str(error.value)


def test_a_budget_with_room_for_4_drafts_is_too_small_for_the_16_of_auto(model_dir):
    fields = {"method": METHOD, "draft_kv_policy": "snapkv", "draft_kv_granularity": "token"}
    fields |= {"snapkv_window": 1, "snapkv_recent": 0, "draft_kv_budget": 12}
    configure(model_dir, fields)
    with pytest.raises(MagicDecConfigError, match="draft_kv_budget=12 cannot hold"):
        configure(model_dir, {**fields, **AUTO})


def on_a_gpu(model_dir, monkeypatch, fields, *, v2: bool):
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
    config = configure(model_dir, {"method": METHOD})
    spec = EngineSpeculativeConfig(
        **{"method": METHOD, "num_speculative_tokens": 6, **fields},
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    config.speculative_config = spec
    spec.verify_engine(config)
    return spec


ON = {"draft_lookup": "on"}


def test_on_gpus_lookups_run_on_the_device(model_dir, monkeypatch):
    spec = on_a_gpu(model_dir, monkeypatch, ON, v2=True)
    assert spec.draft_lookup == "on" and spec.looks_up_on_device
    # Then vLLM's V2 runner keeps all tokens on the device.
    assert spec.use_ngram()
    plain = on_a_gpu(model_dir, monkeypatch, {}, v2=True)
    assert plain.draft_lookup == "off" and not plain.use_ngram()
    auto = {"num_speculative_tokens": "auto"}
    unasked = on_a_gpu(model_dir, monkeypatch, auto, v2=True)
    assert unasked.draft_lookup == "off" and not unasked.looks_up_on_device
    asked = on_a_gpu(model_dir, monkeypatch, {**auto, **ON}, v2=True)
    assert asked.looks_up_on_device and len(asked.round_lengths) > 3


@pytest.mark.parametrize(
    ("fields", "v2", "sentence"),
    [
        ({}, False, "needs vLLM's V2 model runner on GPUs; remove VLLM_USE_V2_MODEL_RUNNER=0"),
        ({**ON, "num_speculative_tokens": 1}, True, "use num_speculative_tokens of 2 or more"),
        ({**ON, "draft_lookup_sources": ["context", "served"]}, True, "use ['context'], or remove"),
        ({**ON, **SNAPKV}, True, "use draft_kv_granularity='page', or draft_lookup='off'"),
    ],
)
def test_unsupported_engines_on_gpus_are_refused(model_dir, monkeypatch, fields, v2, sentence):
    with pytest.raises(MagicDecConfigError) as error:
        on_a_gpu(model_dir, monkeypatch, fields, v2=v2)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_lookups_on_the_v2_runner_need_a_number_of_drafts(model_dir, monkeypatch):
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = configure(model_dir, {"method": METHOD, "draft_lookup": "on"})
    assert config.use_v2_model_runner and config.speculative_config.draft_lookup == "on"
    auto = {"method": METHOD, "num_speculative_tokens": "auto"}
    assert configure(model_dir, auto).speculative_config.draft_lookup == "off"
    with pytest.raises(MagicDecConfigError, match="with num_speculative_tokens='auto' on the V2 model"):
        configure(model_dir, {**auto, "draft_lookup": "on"})


def test_adaptive_verification_needs_cuda_graphs(model_dir, monkeypatch):
    adaptive = {"method": METHOD, **ADAPTIVE}
    configure(model_dir, {**adaptive, "enable_adaptive_verification": False})
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    with pytest.raises(MagicDecConfigError, match="needs CUDA graphs; remove --enforce-eager, or this"):
        configure(model_dir, adaptive, enforce_eager=True)
    target = configure(model_dir, {"method": METHOD}).speculative_config.target_model_config
    both = {"target_model_config": target, "target_parallel_config": ParallelConfig()}
    assert replace(MagicDecSpeculativeConfig(**adaptive, **both)).enable_adaptive_verification


@pytest.mark.parametrize(
    ("policy", "on_cpu", "on_gpu"),
    [("streamingllm", None, None), ("snapkv", "page", "token"), ("verify-topk", "page", "page")],
)
def test_default_granularity(policy, on_cpu, on_gpu):
    fields = MagicDecSpeculativeConfig(method=METHOD, draft_kv_policy=policy)
    found = find_policy(policy)
    assert (found.granularity(fields, "cpu"), found.granularity(fields, "cuda")) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (MambaConfig(architectures=["MambaForCausalLM"]), "recurrent state"),
        (T5Config(architectures=["WhisperForConditionalGeneration"]), "encoder-decoder"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, config, sentence):
    fields = json.loads(config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": 4096}))
    with pytest.raises(MagicDecConfigError, match=sentence):
        configure(str(tmp_path), {"method": METHOD})


def test_weights_on_gpus_are_those_that_vllm_quantises_online(model_dir, monkeypatch):
    config = configure(model_dir, {"method": METHOD}, dtype="bfloat16")
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    check_draft_weights("fp8_per_tensor", config)
    with pytest.raises(MagicDecConfigError, match="use one of 'target', 'fp8_per_tensor'") as refused:
        check_draft_weights("int4", config)
    assert "nvfp4" not in str(refused.value), "vLLM quantises experts alone to it"
