# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that the plugin wraps when vLLM loads it, as data.

Each row of `HOOKS` states its target and the reason. Engines with other methods are not affected, except
that they can have the attention kernel for CPUs, `auto`, and limits of requests. No file of vLLM is edited.
If vLLM has a registry for out-of-tree speculators (see `patches/`), the plugin registers its classes there
and installs only `HOOKS_BESIDE_REGISTRY`.

Engines with a method of the plugin later patch more: `attention/switch.py` wraps the attention of each
layer, and `cpu_sampling.py` and `cpu_llvmlite.py` fix vLLM on CPUs.
"""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

from vllm.logger import init_logger

from vllm_magicdec import envs
from vllm_magicdec.adaptive.request_limits import check_limit, drop_drafts
from vllm_magicdec.config import AdaptiveConfig, MagicDecSpeculativeConfig, VllmMethodConfig
from vllm_magicdec.config.given import check_given, extends_method, refuse_misspelt_method, selects_magicdec
from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.hooking import Hook, Wrap, after, before, in_words, instead
from vllm_magicdec.vllm_api.counts import add_logger, pass_on, send
from vllm_magicdec.vllm_api.draft_window import window_groups
from vllm_magicdec.vllm_api.drafts_with_output import keep_drafts, send_drafts, update_drafts
from vllm_magicdec.vllm_api.engine_config import (
    EngineSpeculativeConfig,
    adapt_vllm_method,
    fit_adapters,
    reads_activations,
)
from vllm_magicdec.vllm_api.options import add_options
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler

logger = init_logger(f"vllm.{__name__}")

_PACKAGE = "vllm_magicdec."


def _constructs(subclass: Callable[[dict[str, Any]], type | None]) -> Wrap:
    """Wrap `__new__` to construct `subclass(arguments)`, or vLLM's class where that is None.

    `arguments` are the constructor's arguments by name. Python then runs the subclass's `__init__`. Another
    plugin may have wrapped `__new__` as well, or put a subclass of its own in the place of vLLM's class.
    """

    def wrap(owner: type, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(owner)

        def __new__(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            # The subclass checks keywords that vLLM's class does not have.
            positional = dict(zip(signature.parameters, args, strict=False))
            made_cls = cls
            if not cls.__module__.startswith(_PACKAGE):
                made_cls = subclass({**positional, **kwargs}) or cls
            made = (
                object.__new__(made_cls)
                if original is object.__new__
                else original(made_cls, *args, **kwargs)
            )
            if not isinstance(made, cls):
                made.__init__(*args, **kwargs)  # Python does so for instances of `cls` alone
            return made

        return __new__

    return wrap


def _config_class(fields: dict[str, Any]) -> type | None:
    refuse_misspelt_method(fields)
    if selects_magicdec(fields):
        return EngineSpeculativeConfig
    return VllmMethodConfig if extends_method(fields) else None


def _is_ours(vllm_config: Any) -> bool:
    return isinstance(getattr(vllm_config, "speculative_config", None), MagicDecSpeculativeConfig)


def _has_counts(vllm_config: Any) -> bool:
    spec = vllm_config.speculative_config
    return isinstance(spec, AdaptiveConfig) and (spec.adaptive or not isinstance(spec, VllmMethodConfig))


def _proposer_class(arguments: dict[str, Any]) -> type | None:
    if not _is_ours(arguments.get("vllm_config")):
        return None
    from vllm_magicdec.vllm_api.draft_models_v1 import proposer_class

    return proposer_class(arguments["vllm_config"])


def _make_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    if _is_ours(vllm_config):
        from vllm_magicdec.vllm_api.draft_models_v2 import make_speculator

        return make_speculator(vllm_config, device, req_states)
    speculator = original(vllm_config, device, req_states)
    if _wants_window(vllm_config):

        def window(nothing: None, *_: Any, **__: Any) -> None:
            window_groups(chain.from_iterable(speculator.attn_groups), vllm_config, device)

        speculator.set_attn = after(window)(speculator, speculator.set_attn)
    return speculator


def _wants_window(vllm_config: Any) -> bool:
    spec = vllm_config.speculative_config
    return isinstance(spec, VllmMethodConfig) and spec.draft_kv_budget is not None


def _add_options(parser: Any, *_: Any) -> Any:
    try:
        return add_options(parser)
    except Exception as error:  # other methods use this parser too
        logger.warning("vllm-magicdec adds no options to vLLM's command line (%s).", in_words(error))
        return parser


def _check_configuration(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    given = engine_args.speculative_config
    options = {
        "method": engine_args.spec_method,
        "model": engine_args.spec_model,
        "num_speculative_tokens": engine_args.spec_tokens,
    }
    check_given(given, options)
    # vLLM adds the options to this dictionary. API servers and Ray resolve the same arguments again,
    # and the options would be refused as given twice.
    engine_args.speculative_config = dict(given) if isinstance(given, dict) else given
    try:
        vllm_config = original(engine_args, *args, **kwargs)
    except ValueError as error:
        fields = fit_adapters(engine_args, given or {}, options) if type(error) is ValueError else None
        if fields is None:
            raise
        engine_args.speculative_config = fields
        vllm_config = original(engine_args, *args, **kwargs)
    finally:
        engine_args.speculative_config = given
    spec = vllm_config.speculative_config
    if isinstance(spec, EngineSpeculativeConfig):
        spec.verify_engine(vllm_config)
    elif isinstance(spec, VllmMethodConfig):
        adapt_vllm_method(spec, vllm_config)
    return vllm_config


def _reserve_memory(
    original: Callable[..., Any],
    vllm_config: Any,
    kv_cache_specs: Any,
    available_memory: list[int],
    *args: Any,
) -> Any:
    if _is_ours(vllm_config):
        from vllm_magicdec.vllm_api.kv_cache import leave_memory_for_drafting

        available_memory = [
            leave_memory_for_drafting(vllm_config, specs, available)
            for specs, available in zip(kv_cache_specs, available_memory, strict=True)
        ]
    return original(vllm_config, kv_cache_specs, available_memory, *args)


def _pass_adapters(batch: Any, runner: Any, *_: Any, **__: Any) -> Any:
    if runner.lora_config is not None and _is_ours(runner.vllm_config):
        from vllm_magicdec.vllm_api.adapters import pass_adapters

        pass_adapters(runner, batch)
    return batch


def _check_drafter(runner: Any, drafter: Any) -> None:
    """Refuse to start with a drafter that another plugin has put in place of the method's own."""
    if not _is_ours(runner.vllm_config):
        return
    from vllm_magicdec.vllm_api.draft_runner import DraftRunner

    if not isinstance(drafter, DraftRunner):
        made = f"{type(drafter).__module__}.{type(drafter).__qualname__}"
        raise MagicDecConfigError(
            f"{runner.vllm_config.speculative_config.name}: another plugin makes the drafter ({made}); "
            "leave that plugin out, for example with VLLM_PLUGINS=magicdec"
        )


def _before_loading_v2(runner: Any, *_: Any, **__: Any) -> None:
    _check_drafter(runner, runner.speculator)
    spec = runner.vllm_config.speculative_config
    if isinstance(spec, MagicDecSpeculativeConfig) and reads_activations(spec):
        runner.use_aux_hidden_state_outputs = True


def _send_with_output(output: Any, runner: Any, *_: Any, **__: Any) -> Any:
    if not _is_ours(runner.vllm_config):
        return output
    return send_drafts(runner, send(_draft_of(runner).counts, output))


def _draft_of(runner: Any) -> Any:
    return getattr(runner, "drafter", None) or runner.speculator


def _update_draft(nothing: None, runner: Any, *_: Any, **__: Any) -> None:
    if _is_ours(runner.vllm_config):
        _draft_of(runner).update_weights()


def _refuse_draft_update(worker: Any) -> None:
    spec = worker.vllm_config.speculative_config
    if isinstance(spec, MagicDecSpeculativeConfig) and not spec.has_draft_model:
        raise MagicDecConfigError(
            f"{spec.name}: the draft has no weights of its own; update the target's (start_weight_update)"
        )


def _receive_with_output(
    outputs: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    if _has_counts(scheduler.vllm_config):
        pass_on(scheduler, model_runner_output, outputs.values())
        keep_drafts(scheduler, model_runner_output)
    return outputs


def _use_received_drafts(original: Callable[..., Any], core: Any, model_executed: bool) -> None:
    # In vLLM 0.32, post_step only requests the drafts.
    if not (model_executed and _is_ours(core.vllm_config) and update_drafts(core.scheduler)):
        original(core, model_executed)


def _attend_natively(vllm_config: Any, kv_cache_config: Any, device: Any) -> None:
    # Engines with a method of the plugin have the field `native_attention` instead.
    if not envs.native_attention() or device.type != "cpu" or _is_ours(vllm_config):
        return
    from vllm_magicdec.attention.native_attention import use_native_attention

    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    use_native_attention(vllm_config, names)


def _before_kv_cache_v1(runner: Any, kv_cache_config: Any, *_: Any, **__: Any) -> None:
    spec = runner.vllm_config.speculative_config
    is_stateless = isinstance(spec, VllmMethodConfig) and spec.method == "ngram"
    # A target with recurrent state must be told of every step how many drafts were accepted.
    if is_stateless and runner.device.type == "cpu" and not runner.model_config.is_hybrid:
        bypass_rejection_sampler(runner)
    drafter = getattr(runner, "drafter", None)  # None in the first stages of a pipeline
    if drafter is not None and _wants_window(runner.vllm_config):
        window_groups(drafter.draft_attn_groups, runner.vllm_config, drafter.device)
    _check_drafter(runner, drafter)
    _attend_natively(runner.vllm_config, kv_cache_config, runner.device)


def _attend_natively_v2(
    forward_context: Any,
    kv_cache_config: Any,
    device: Any,
    kernel_block_sizes: Any,
    vllm_config: Any,
    *_: Any,
    **__: Any,
) -> None:
    _attend_natively(vllm_config, kv_cache_config, device)


def _export_counts(nothing: None, manager: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
    if _has_counts(vllm_config):
        add_logger(manager, vllm_config)


ACTIVATIONS_HOOK = Hook.of(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.load_model(self, load_dummy_weights)",
    reason="a SPIRe draft reads activations of the target, which the V2 runner returns for few methods",
    wrap=before(_before_loading_v2),
)

# Hooks that are still needed if vLLM's registry constructs the plugin's classes.
HOOKS_BESIDE_REGISTRY = (
    Hook.of(
        "vllm.v1.engine.core",
        "get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory)",
        reason="drafting needs device memory that the KV cache must not take",
        wrap=instead(_reserve_memory),
    ),
    Hook.of(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.prepare_inputs"
        "(self, scheduler_output, batch_req_state, batch_desc, num_active_loras)",
        reason="on the V2 runner, draft passes and verified positions need each request's LoRA adapter",
        wrap=after(_pass_adapters),
    ),
    *(
        Hook.of(
            module,
            "GPUModelRunner.sample_tokens(self, grammar_output)",
            reason="counts and drafts of a worker travel with the output of its step, also between hosts",
            wrap=after(_send_with_output),
        )
        for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
    ),
    *(
        Hook.of(
            module,
            "GPUModelRunner.reload_weights(self, weights_iterator, weights_path, is_checkpoint_format)",
            reason="a draft that copies the target's weights follows their update",
            wrap=after(_update_draft),
        )
        for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
    ),
    Hook.of(
        "vllm.v1.worker.gpu_worker",
        "Worker.start_draft_weight_update(self)",
        reason="a trainer would overwrite the target's modules, of which a self-draft consists",
        wrap=before(_refuse_draft_update),
    ),
    Hook.of(
        "vllm.v1.worker.gpu_worker",
        "Worker.finish_weight_update(self)",
        reason="the same for weights that a trainer sends",
        wrap=after(lambda nothing, worker: _update_draft(nothing, worker.model_runner)),
    ),
    Hook.of(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
        reason="the scheduler keeps the received drafts and sends the counts to the front end",
        wrap=after(_receive_with_output),
    ),
    Hook.of(
        "vllm.v1.engine.input_processor",
        "InputProcessor._validate_params(self, params, supported_tasks)",
        reason="a client gets a sentence for a limit of drafts that is none",
        wrap=before(check_limit),
    ),
    Hook.of(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule(self, throttle_prefills)",
        reason="a request may limit its drafts, in engines of every method",
        wrap=before(drop_drafts),
    ),
    Hook.of(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__(self, vllm_config)",
        reason="the front end exports the counts beside vLLM's metrics",
        wrap=after(_export_counts),
    ),
    Hook.of(
        "vllm.v1.engine.core",
        "EngineCore.post_step(self, model_executed)",
        reason="drafts that arrived with the output need no further request, which would stall the workers",
        wrap=instead(_use_received_drafts),
    ),
    # The last two run after the KV cache layout is known and before layers are bound to their caches, which
    # may move.
    Hook.of(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.initialize_kv_cache_tensors(self, kv_cache_config)",
        reason="plain decoding and vLLM's methods can use the attention kernel for CPUs on the V1 runner",
        wrap=before(_before_kv_cache_v1),
    ),
    Hook.of(
        "vllm.v1.worker.gpu.model_runner",
        "init_kv_cache(forward_context, kv_cache_config, device, kernel_block_sizes, vllm_config)",
        reason="plain decoding and vLLM's methods can use the attention kernel for CPUs on the V2 runner",
        wrap=before(_attend_natively_v2),
    ),
)

HOOKS = (
    Hook.of(
        "vllm.config.speculative",
        "SpeculativeConfig.__new__",
        reason="vLLM's class has neither the plugin's methods nor its draft_kv_* fields",
        wrap=_constructs(_config_class),
    ),
    Hook.of(
        "vllm.v1.spec_decode.draft_model",
        "DraftModelProposer.__new__",
        reason="the V1 runner drafts over a view of the KV cache",
        wrap=_constructs(_proposer_class),
    ),
    Hook.of(
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator(vllm_config, device, req_states)",
        reason="the V2 runner drafts over a view of the KV cache",
        wrap=instead(_make_speculator),
    ),
    Hook.of(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config(self)",
        reason="unsupported configurations are refused before any process starts or any weight is read",
        wrap=instead(_check_configuration),
    ),
    Hook.of(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args(parser)",
        reason="the command line accepts --speculative-model and prints --help=magicdec",
        wrap=after(_add_options),
    ),
    ACTIVATIONS_HOOK,
    *HOOKS_BESIDE_REGISTRY,
)
