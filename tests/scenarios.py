# SPDX-License-Identifier: Apache-2.0
"""Scenarios that tests run in an engine, by name; see `run`.

Scenarios patch the engine for the rest of its life. Functions that run inside workers are in
inside_workers.py and spire_scenarios.py.
"""

import functools
import importlib
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

# `generate` after functions of the workers, with their arguments.
GENERATE_AFTER: dict[str, list[tuple[Any, ...]]] = {
    "generate_with_broken_memory": [("break_memory",)],
    "generate_with_broken_acceptance": [("believe_in_uniform_drafts",)],
    "generate_with_waiting_drafts": [("wait_in_drafts",)],
    "generate_with_late_prompts": [("read_prompts_late",)],
    # Only drafts with a high expected acceptance are verified.
    "generate_with_cut_drafts": [("look_up_at_random", 0), ("cut_drafts", 0.5)],
    "generate_without_unlikely_drafts": [("look_up_at_random", 0), ("leave_unlikely_out", 0.5)],
    # One pass per round, after which lookups are verified unchecked.
    "generate_with_unchecked_ends": [("look_up_at_random", 0), ("cut_drafts", 0.0, 1e9)],
}
# `generate`, whose answers are "batches", and beside them what a function of the workers notes meanwhile.
GENERATE_AND_NOTE = {
    "generate_and_note_inputs": "note_inputs",
    "generate_and_note_saves": "note_saves",
    "generate_and_draft_twice": "draft_twice",
}


def run(llm: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Run a scenario of this module or of `GENERATE_AFTER`.

    Other names are functions of the workers, of which the first one's result is returned.
    """
    if name in globals():
        return globals()[name](llm, **arguments)
    if name in GENERATE_AND_NOTE:
        in_workers(llm, GENERATE_AND_NOTE[name])
        return {"batches": generate(llm, **arguments), **in_workers(llm, "noted")[0]}
    for function, *given in GENERATE_AFTER.get(name, []):
        in_workers(llm, function, *given)
    return generate(llm, **arguments) if name in GENERATE_AFTER else in_workers(llm, name, **arguments)[0]


def in_workers(llm: Any, name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Return each worker's result of a function of inside_workers.py or spire_scenarios.py."""
    modules = map(importlib.import_module, ("inside_workers", "spire_scenarios"))
    function = next(getattr(module, name) for module in modules if hasattr(module, name))
    return llm.collective_rpc(function, args=args, kwargs=kwargs)


def generate(llm: Any, batches: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Generate answers to batches, one batch after the other.

    A batch is {"prompts": [...], "sampling": {...} or one per prompt} and optionally "adapters": for each
    request the number and folder of a LoRA adapter, or None. A prompt is a list of token ids, or
    {"tokens": ids, "image": [{"width", "height", "seed"}, ...]} for pictures of noise; entries of "video"
    also have "frames". {"embeddings_of": ids} gives the model's embeddings of the tokens.
    """
    from vllm.lora.request import LoRARequest

    results = []
    for batch in batches:
        prompts = [_prompt(given) for given in batch["prompts"]]
        sampling = batch["sampling"]
        given = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        params = [_sampling_params(one) for one in given]
        adapters = [one and LoRARequest(str(one[0]), *one) for one in batch.get("adapters", [])]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters or None)
        results.append([_describe(output) for output in outputs])
    return results


def generate_after_reload(llm: Any, batches: list[dict[str, Any]], weights: str) -> Any:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
    llm.reset_prefix_cache()
    return generate(llm, batches)


def generate_with_random_schedule(llm: Any, batches: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """`generate` with a random number of drafts in each step (0 included) and random lookups.

    For engines with `auto`, whose controller is bypassed. The engine core must be in this process. Returns
    the numbers of drafts that were "planned", and as "gammas" how often a request had each number verified.
    """
    from vllm_magicdec.adaptive.draft_plan import DraftPlan
    from vllm_magicdec.adaptive.value import PLAIN

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    controller, spec = scheduler._controller, llm.llm_engine.vllm_config.speculative_config
    rng, planned, gammas = random.Random(seed), [], Counter()
    schedule = scheduler.schedule

    def plan(choice: Any) -> DraftPlan:
        # Often 0, so that several steps in a row have no drafts.
        gamma = rng.choice([0, rng.randint(0, spec.num_speculative_tokens)])
        planned.append(gamma)
        if not spec.looks_up_on_host:
            return DraftPlan(gamma)
        # At infinity no lookup is verified unless the draft has checked it, at 0 each one is.
        return DraftPlan(gamma, min_expected_accepted=rng.choice([0.0, float("inf")]))

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        gammas.update(len(drafts) for drafts in output.scheduled_spec_decode_tokens.values())
        gammas[0] += sum(number == 1 for number in output.num_scheduled_tokens.values())
        return output

    controller.choose, controller.plan = lambda *_, **__: PLAIN, plan
    scheduler._observe = lambda *_: None
    scheduler.schedule = schedule_and_count
    if getattr(spec, "draft_lookup", "off") == "on":
        in_workers(llm, "look_up_at_random", seed)
    results = generate(llm, batches)
    return {"batches": results, "planned": sorted(set(planned)), "gammas": gammas}


def generate_with_random_lookups(llm: Any, batches: list[dict[str, Any]], seed: int = 0) -> Any:
    """`generate` with lookups of random length, in which any token may be replaced."""
    in_workers(llm, "look_up_at_random", seed)
    return generate(llm, batches)


def generate_under_faults(llm: Any, batches: list[dict[str, Any]], faults: list[str], file: str) -> Any:
    """`generate_and_count` under one fault after the other; `engines.FAULT` names the file. Pauses end."""
    results = []
    for fault in faults:
        in_workers(llm, "forget_failures")
        Path(file).write_text(fault)
        results.append(generate_and_count(llm, batches))
    return results


def generate_with_a_cut_file(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """`generate` after halving a file that the engine has mapped; also returns counter increments."""
    os.truncate(path, os.path.getsize(path) // 2)
    return generate_and_count(llm, batches)


def generate_and_count(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    before = metrics_of(llm)
    results = generate(llm, batches)
    counted = {
        name: value - before.get(name, 0)
        for name, value in metrics_of(llm).items()
        if name.startswith(("vllm:magicdec", "vllm:spec")) and isinstance(value, int | float)
    }
    return {"batches": results, "counted": counted}


def noted_by_ranks(llm: Any) -> list[Any]:
    return in_workers(llm, "noted")


def generate_and_note_spire_drafts(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """`generate`; saves the tokens and logits of a SPIRe draft to `path`."""
    for name in ("write_norms_in_place", "note_drafts"):
        in_workers(llm, name)
    results = generate(llm, batches)
    in_workers(llm, "save_drafts", path)
    return results


def selections(llm: Any, prompts: list[list[int]], max_tokens: int = 4) -> list[dict[str, Any]]:
    """Return the selection of a token policy for each prompt, from the first worker."""
    from vllm import SamplingParams

    selected = []
    for prompt in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        selected.append(in_workers(llm, "latest_selection")[0])
    return selected


def score(llm: Any, texts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Return (logprob of the token, logprob of the best token) for every token of the answers."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": text["prompt"] + text["tokens"]} for text in texts]
    scores = []
    for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        steps = zip(text["tokens"], output.prompt_logprobs[len(text["prompt"]) :], strict=True)
        best = [(step[token].logprob, max(one.logprob for one in step.values())) for token, step in steps]
        scores.append(best)
    return scores


def _prompt(given: Any) -> dict[str, Any]:
    if isinstance(given, list):
        return {"prompt_token_ids": given}
    if "embeddings_of" in given:
        return {"prompt_embeds": _embedding_table()[given["embeddings_of"]]}
    data = {name: [_noise(**one) for one in given[name]] for name in ("image", "video") if name in given}
    return {"prompt_token_ids": given["tokens"], "multi_modal_data": data}


@functools.cache
def _embedding_table() -> Any:
    """Return the shipped model's embeddings, [vocab_size, hidden_size] float32."""
    import engines
    from safetensors.torch import load_file

    return load_file(engines.MODEL / "model.safetensors")["model.embed_tokens.weight"].float()


def _noise(width: int, height: int, seed: int, frames: int = 0) -> Any:
    """Create a picture, or a video if `frames` is not 0."""
    import numpy as np
    from PIL import Image

    shape = (frames, height, width, 3) if frames else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return pixels if frames else Image.fromarray(pixels)


def _sampling_params(fields: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = fields.get("structured_outputs")
    own = {} if grammar is None else {"structured_outputs": StructuredOutputsParams(**grammar)}
    return SamplingParams(**{**fields, **own})


def _describe(output: Any) -> dict[str, Any]:
    return {
        "cached_tokens": output.num_cached_tokens,
        "completions": [
            {
                "tokens": list(completion.token_ids),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "logprobs": [
                    {str(token): entry.logprob for token, entry in step.items()}
                    for step in completion.logprobs or []
                ],
            }
            for completion in output.outputs
        ],
    }


def metrics_of(llm: Any) -> dict[str, Any]:
    """Return metrics by name; labelled ones by "name:label"."""
    return {
        f"{metric.name}:{metric.labels['what']}" if "what" in metric.labels else metric.name: getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
    }
