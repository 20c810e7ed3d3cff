# SPDX-License-Identifier: Apache-2.0
"""Refusals of models and parallel layouts that the speculative config can check.

`vllm_api/engine_config.py` checks the rest of the engine. All functions raise ValueError with the reason
and an alternative; `MagicDecSpeculativeConfig` adds the method's name.
"""

from vllm.config import ModelConfig, ParallelConfig
from vllm.platforms import current_platform

from vllm_magicdec.errors import METHOD
from vllm_magicdec.spire.settings import SpireSettings

SPARSE_MLA_FIELDS = ("index_topk", "compress_ratios")  # of a Hugging Face configuration


def check_model(model: ModelConfig, instead: str = "serve it without speculation") -> None:
    """Refuse models whose state a draft step would destroy or could not read."""
    if model.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported; {instead}")
    if model.is_attention_free or model.is_hybrid or model.has_inner_state:
        raise ValueError(
            "models with recurrent state (Mamba, linear attention) are not supported because a draft "
            f"step would overwrite that state; {instead}"
        )
    if model.requires_raw_input_tokens:
        raise ValueError(
            "models that take more than a token at every step (Voxtral realtime) are not supported; "
            f"{instead}"
        )
    if model.use_mla and any(hasattr(model.hf_text_config, name) for name in SPARSE_MLA_FIELDS):
        raise ValueError(
            "sparse MLA models (DeepSeek-V3.2 and V4, GLM-5) are not supported because their attention "
            "reads few tokens already, however long the context; use vLLM's 'mtp' method"
        )


def check_draft_model(draft: ModelConfig, target: ModelConfig) -> None:
    """Refuse drafts that cannot follow their target."""
    name = f"model={draft.model!r}"
    if target.use_mla or draft.use_mla:
        raise ValueError(
            f"{name}: MLA models are not supported beside or as a draft model; draft with the target "
            f"itself ({METHOD})"
        )
    for role, model in (("target", target), ("draft", draft)):
        if model.supports_multimodal_inputs or model.enable_prompt_embeds:
            raise ValueError(
                f"{name}: the {role} takes more than text, which a draft model would not see; draft with "
                f"the target itself ({METHOD}), or "
                + (
                    "serve text alone (--limit-mm-per-prompt with 0 of everything, without "
                    "--enable-prompt-embeds)"
                    if model is target
                    else "with a model that takes text alone"
                )
            )
    try:
        check_model(draft, instead="use another draft")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if getattr(draft.hf_text_config, "attention_chunk_size", None):
        raise ValueError(
            f"{name}: draft models with local chunks (Llama 4) are not supported because a view begins "
            "with its chunk, and what the draft has not read yet may lie before; use another draft, or "
            f"draft with the target itself ({METHOD})"
        )
    if draft.max_model_len < target.max_model_len:
        raise ValueError(
            f"{name} reads at most {draft.max_model_len} tokens; use --max-model-len "
            f"{draft.max_model_len} or another draft"
        )


def check_spire(draft: ModelConfig, target: ModelConfig, fields: SpireSettings) -> None:
    """Refuse a SPIRe draft that was trained for a target of another shape."""
    theirs, own = target.hf_text_config, draft.hf_text_config
    needed = {
        "num_hidden_layers": (fields.target_num_hidden_layers, theirs.num_hidden_layers),
        "hidden_size": (own.hidden_size, theirs.hidden_size),
        "vocab_size": (own.vocab_size, theirs.vocab_size),
    }
    for name, (trained, served) in needed.items():
        if trained != served:
            raise ValueError(
                f"model={draft.model!r} is a SPIRe draft of a target ({fields.target}) with {name}="
                f"{trained}, and {target.model!r} has {served}; name the draft of this one, or train it "
                "with 'magicdec train-draft'"
            )


def check_parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Refuse layouts in which a worker lacks layers or tokens of a request."""
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported because a draft "
            "step needs all layers in one place; use --tensor-parallel-size instead"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "context parallelism (DCP, PCP) is not supported; set both context parallel sizes to 1"
        )
    if model.is_moe and parallel.data_parallel_size > 1:
        raise ValueError(
            "data parallelism is not supported for mixture-of-experts models because every draft step is a "
            "collective that ranks without requests would have to join; use --tensor-parallel-size, with "
            "--enable-expert-parallel if you like"
        )
    if parallel.data_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise ValueError(
            "data parallelism with the executor 'external_launcher' is not supported because its "
            "ranks meet in every pass, and each drafts as many as its own requests take; start one engine "
            "per rank"
        )
    if parallel.enable_eplb:
        raise ValueError(
            "expert load balancing is not supported because vLLM would balance the target a second time, "
            "as its own draft; remove --enable-eplb"
        )
    if parallel.use_ubatching:
        raise ValueError("dual batch overlap is not supported; remove --enable-dbo")


def check_adaptive_verification(model: ModelConfig, *, is_adaptive: bool) -> None:
    """Refuse vLLM's adaptive verification where it has no effect or conflicts with `auto`."""
    if is_adaptive:
        raise ValueError(
            "enable_adaptive_verification needs a fixed num_speculative_tokens, as 'auto' would take "
            "the drafts that vLLM leaves out for wrong ones; give a number, or remove it"
        )
    if not current_platform.is_cuda_alike():
        raise ValueError("enable_adaptive_verification needs a GPU; remove it")
    if model.enforce_eager:
        raise ValueError(
            "enable_adaptive_verification needs CUDA graphs; remove --enforce-eager, or this field"
        )
