# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that the plugin needs besides the hooks, as data.

The list has base classes of the plugin's classes, methods that it overrides or calls, and private or
untyped attributes that mypy does not check. The plugin checks all of them before it installs a hook.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec

from vllm_magicdec.hooking import Required

_GPU = "vllm.v1.worker.gpu"
_SPEC_DECODE = f"{_GPU}.spec_decode"

# By module: functions, classes and attributes of classes, with the parameters or fields in use. A name
# that begins with a dot belongs to the class before it.
_NAMES = {
    "vllm.engine.arg_utils": "EngineArgs(speculative_config, spec_method, spec_model, spec_tokens)",
    "vllm.config": "get_layers_from_vllm_config(vllm_config, layer_type)",
    "vllm.config.utils": "config get_attr_docs",
    "vllm.config.speculative": """
        SpeculativeConfig(num_speculative_tokens, model, method, target_model_config,
            target_parallel_config, draft_model_config, draft_parallel_config, draft_sample_method,
            rejection_sample_method, num_speculative_tokens_per_batch_size)
        .uses_draft_model .max_num_new_slots_for_drafting
    """,
    "vllm.config.scheduler": "SchedulerConfig(scheduler_cls, async_scheduling)",
    "vllm.config.cache": """
        CacheConfig(kv_cache_memory_bytes, num_gpu_blocks_override) .user_specified_block_size
    """,
    "vllm.config.kv_transfer": "KVTransferConfig.is_kv_consumer",
    "vllm.config.model": """
        ModelConfig(enable_prompt_embeds) .get_num_attention_heads(parallel_config)
        .supports_multimodal_inputs .requires_raw_input_tokens
    """,
    "vllm.config.vllm": "VllmConfig .use_v2_model_runner .num_lookahead_tokens",
    "vllm.forward_context": """
        BatchDescriptor(num_tokens)
        set_forward_context(attn_metadata, vllm_config, num_tokens, cudagraph_runtime_mode, slot_mapping,
            batch_descriptor, is_padding, skip_compiled)
    """,
    "vllm.distributed.kv_transfer.kv_transfer_state": "_KV_CONNECTOR_AGENT",
    "vllm.lora.model_manager": "LoRAModelManager .set_adapter_mapping(mapping) .activate_adapter(lora_id)",
    "vllm.model_executor.models.interfaces": """
        EagleModelMixin ._set_aux_hidden_state_layers(layers) .aux_hidden_state_layers
    """,
    "vllm.v1.attention.backend": """
        CommonAttentionMetadata(query_start_loc, query_start_loc_cpu, seq_lens, max_query_len, max_seq_len,
            block_table_tensor, seq_lens_cpu_upper_bound, mm_req_doc_ranges, _num_computed_tokens_cache)
    """,
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler._update_after_schedule(scheduler_output)",
    "vllm.v1.core.sched.output": """
        SchedulerOutput(num_scheduled_tokens, scheduled_spec_decode_tokens, num_spec_tokens_to_schedule,
            finished_req_ids)
    """,
    "vllm.v1.core.sched.scheduler": """
        Scheduler .schedule ._update_after_schedule(scheduler_output)
        .get_grammar_bitmask(scheduler_output) .update_draft_token_ids(draft_token_ids)
    """,
    "vllm.v1.engine.core": "EngineCore.scheduler",
    "vllm.v1.attention.backends.cpu_attn": """
        CPUAttentionMetadataBuilder.layer_names CPUAttentionBackendImpl .sinks .sliding_window
    """,
    "vllm.v1.kv_cache_interface": """
        FullAttentionSpec(block_size, num_kv_heads, head_size, dtype) AttentionSpec.page_size_bytes
        SlidingWindowSpec(sliding_window) UniformTypeKVCacheSpecs(kv_cache_specs)
        KVCacheConfig(num_blocks, kv_cache_groups) KVCacheGroupSpec(layer_names, kv_cache_spec)
    """,
    "vllm.v1.outputs": "ModelRunnerOutput(req_id_to_index, sampled_token_ids)",
    "vllm.v1.spec_decode.draft_model": "DraftModelProposer.__init__(vllm_config, device)",
    "vllm.v1.spec_decode.llm_base_proposer": """
        SpecDecodeBaseProposer
        .propose(num_speculative_tokens, target_token_ids, target_positions, target_hidden_states,
            next_token_ids, token_indices_to_sample, common_attn_metadata, sampling_metadata,
            mm_embed_inputs, num_rejected_tokens_gpu, slot_mappings)
        .prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)
        .load_model(target_model) .dummy_run(num_tokens) .take_last_draft_probs ._raise_if_mrope
        .initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        ._determine_batch_execution_and_padding(num_tokens, use_cudagraphs)
        ._sample_draft_tokens(hidden_states, sampling_metadata)
        ._get_positions(num_tokens) ._draft_attn_layer_names .input_ids .inputs_embeds .max_num_tokens
    """,
    "vllm.v1.worker.block_table": "BlockTable .block_table .get_device_tensor(num_reqs)",
    "vllm.v1.worker.utils": """
        AttentionGroup .create_metadata_builders(vllm_config, device, kernel_block_size)
        .get_metadata_builder ._with_kernel_block_table(common_attn_metadata, ubatch_idx)
        .supports_draft_decode_metadata_update .update_draft_decode_metadata(attn_metadata)
    """,
    "vllm.v1.worker.gpu_input_batch": """
        InputBatch .req_prompt_embeds .is_token_ids .generators .token_ids_cpu
        .request_lora_mapping CachedRequestState(output_token_ids, mrope_positions, mrope_position_delta)
    """,
    "vllm.v1.worker.gpu_model_runner": """
        GPUModelRunner .attn_groups .requests .effective_drafter_max_model_len
        .use_aux_hidden_state_outputs .execute_model_state ._sample ._bookkeeping_sync
        .discard_request_mask ._get_positions(num_tokens) .take_draft_token_ids
        ExecuteModelState(aux_hidden_states, slot_mappings)
    """,
    f"{_GPU}.model_runner": "GPUModelRunner .take_draft_token_ids .use_aux_hidden_state_outputs",
    f"{_GPU}.states": """
        RequestState .remove_request(req_id) .req_id_to_index .prompt_len .total_len .all_token_ids
    """,
    f"{_GPU}.input_batch": """
        InputBatch(req_ids, num_reqs, idx_mapping, seq_lens, num_computed_tokens_np, num_scheduled_tokens,
            prefill_len_np, idx_mapping_np, cu_num_logits_np)
    """,
    f"{_GPU}.mm.rope": "RopeState .prefill_positions .prefill_delta .positions",
    f"{_GPU}.model_states.default": "DefaultModelState.rope_state",
    f"{_GPU}.cudagraph_utils": """
        BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs)
        CudaGraphManager(vllm_config, device, cudagraph_mode, decode_query_len)
        ._init_candidates .needs_capture .run_fullgraph(desc) .capture(create_forward_fn, progress_bar_desc)
        .dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)
    """,
    f"{_GPU}.attn_utils": """
        build_attn_metadata(attn_groups, num_reqs, num_tokens, query_start_loc_gpu, query_start_loc_cpu,
            max_query_len, seq_lens, max_seq_len, block_tables, slot_mappings, kv_cache_config, positions,
            is_prefilling, for_cudagraph_capture)
    """,
    f"{_SPEC_DECODE}.standalone_ar.speculator": """
        StandaloneARSpeculator(vllm_config, device) .capture
        .propose(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
            num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state,
            dummy_run, skip_attn_for_dummy_run, mm_inputs, is_profile, num_speculative_tokens)
        .load_draft_model(target_model, target_attn_layer_names)
        .set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        .init_cudagraph_manager(cudagraph_mode)
    """,
    f"{_SPEC_DECODE}.speculator": """
        DraftModelSpeculator .load_model(target_model)
        .sample_draft(hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step,
            draft_logits)
        ._copy_request_inputs(num_reqs, idx_mapping, temperature, seeds)
    """,
}
# How vLLM groups layers (`kv_cache.py`): by a function of vLLM 0.32, since 0.33 by the platform's builder.
if find_spec("vllm.v1.core.kv_cache_config_builder") is None:
    _NAMES["vllm.v1.core.kv_cache_utils"] = "get_kv_cache_groups(vllm_config, kv_cache_spec)"
else:
    _NAMES["vllm.v1.core.kv_cache_config_builder"] = "get_kv_cache_config_builder(vllm_config)"
    _NAMES["vllm.v1.core.kv_cache_planning"] = """
        DefaultKVCacheConfigBuilder.get_kv_cache_groups(vllm_config, kv_cache_spec)
    """


def _parse(module: str, names: str) -> Iterator[Required]:
    owner = ""
    for text in re.findall(r"[\w.]+(?:\([^)]*\))?", names):
        if not text.startswith("."):
            owner = text.partition("(")[0]
        yield Required.of(module, f"{owner}{text}" if text.startswith(".") else text)


REQUIRED = tuple(one for module, names in _NAMES.items() for one in _parse(module, names))
