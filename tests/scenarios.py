# SPDX-License-Identifier: Apache-2.0
"""Scenarios that tests run in an engine, by name; see `engine_process.run_engine`.

Scenarios patch the engine for the rest of its life. Functions that run inside workers are in
inside_workers.py, adaptive_verification.py, recorded_graphs.py and spire_scenarios.py.
"""

import functools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import inside_workers


def generate(llm: Any, batches: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Generate answers to batches, one batch after the other.

    A batch is {"prompts": [...], "sampling": {...} or one per prompt} and optionally "adapters": for each
    request the number and folder of a LoRA adapter, or None. A prompt is a list of token ids, or
    {"tokens": ids, "image": [{"width", "height", "seed"}, ...]} for pictures of noise; entries of "video"
    also have "frames". {"embeddings_of": ids} gives the model's embeddings of the tokens.
    """
    results = []
    for batch in batches:
        sampling = batch["sampling"]
        params = (
            [_sampling_params(one) for one in sampling]
            if isinstance(sampling, list)
            else _sampling_params(sampling)
        )
        prompts = [_prompt(given) for given in batch["prompts"]]
        adapters = [adapter and _adapter(*adapter) for adapter in batch.get("adapters", [])]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters or None)
        results.append([_describe(output) for output in outputs])
    return results


def _adapter(number: int, folder: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, folder)


def generate_after_reload(llm: Any, batches: list[dict[str, Any]], weights: str) -> Any:
    """`generate` with the weights of another folder."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
    llm.reset_prefix_cache()
    return generate(llm, batches)


def generate_without_asking_for_drafts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate`; fails if the engine core asks its workers for drafts, which come with the outputs."""

    def ask() -> None:
        raise AssertionError("the workers were asked for drafts")

    llm.llm_engine.engine_core.engine_core.model_executor.take_draft_token_ids = ask
    return generate(llm, batches)


def generate_with_broken_drafting(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` with a policy that raises."""
    llm.collective_rpc(inside_workers.break_drafting)
    return generate(llm, batches)


def generate_and_note_inputs(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`; also returns names and addresses of the inputs of every forward pass of the target."""
    llm.collective_rpc(inside_workers.note_inputs)
    return {"batches": generate(llm, batches), "inputs": llm.collective_rpc(inside_workers.noted_inputs)[0]}


def generate_and_note_saves(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`; also counts the steps that a KV connector saw, and its saves of each layer."""
    llm.collective_rpc(inside_workers.note_saves)
    results = generate(llm, batches)
    steps, saves = llm.collective_rpc(inside_workers.noted_saves)[0]
    return {"batches": results, "steps": steps, "saves": saves}


def generate_with_broken_acceptance(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate`; drafts sampled from q are verified as if they had been sampled uniformly."""
    llm.collective_rpc(inside_workers.believe_in_uniform_drafts)
    return generate(llm, batches)


def generate_with_random_choices(llm: Any, batches: list[dict[str, Any]], seed: int) -> Any:
    """`generate` while the controller of `auto` chooses at random, with lookups also its thresholds.

    The engine core must be in this process.
    """
    from vllm_magicdec.adaptive.draft_plan import NUM_BUCKETS, DraftPlan
    from vllm_magicdec.adaptive.lookup_value import LookupValue
    from vllm_magicdec.adaptive.value import PLAIN, Choice

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    controller = scheduler._controller
    rng, chosen, is_plain = random.Random(seed), [], []
    lengths = [choice.drafts for choice in controller.value.choices]
    with_lookups = isinstance(controller.value, LookupValue)
    schedule = type(scheduler).schedule

    def choose(*_: Any, **__: Any) -> Choice:
        # Often 0, so that several steps in a row have no drafts.
        if with_lookups:
            drafts = Choice(lengths[-1], lookups_alone=rng.random() < 0.25)
            chosen.append(rng.choice([PLAIN, drafts]))
        else:
            most = rng.choice([0, rng.randint(0, scheduler.num_spec_tokens)])
            # The controller follows the acceptance of its own lengths only.
            chosen.append(Choice(max(n for n in lengths if n <= most)))
        return chosen[-1]

    def plan(choice: Choice) -> DraftPlan:
        def thresholds() -> tuple[float, float, float]:
            min_expected_accepted = rng.choice([0.0, 2.0, 8.0, float("inf")])
            return rng.uniform(0.0, 0.9), rng.uniform(0.0, 4.0), min_expected_accepted

        drafts, alone = choice
        buckets = range(rng.choice([0, NUM_BUCKETS]))
        by_bucket = [DraftPlan(drafts, *thresholds(), lookups_alone=alone) for _ in buckets]
        return DraftPlan(drafts, *thresholds(), by_bucket, alone)

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        if output.num_scheduled_tokens:
            is_plain.append(not (output.scheduled_spec_decode_tokens or output.num_spec_tokens_to_schedule))
        return output

    controller.choose = choose
    if with_lookups:
        controller.plan = plan
    scheduler.schedule = schedule_and_note
    llm.collective_rpc(inside_workers.note_speculative_steps)
    results = generate(llm, batches)
    return {
        "plain_steps": sum(is_plain),
        "speculative_steps": len(is_plain) - sum(is_plain),
        "sampled_as_speculative": llm.collective_rpc(inside_workers.noted_speculative_steps)[0],
        "lengths": sorted({choice.drafts for choice in chosen}),
        "batches": results,
    }


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
        if spec.draft_lookup == "off" or spec.looks_up_on_device:
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
    if spec.draft_lookup == "on":
        llm.collective_rpc(inside_workers.look_up_at_random, args=(seed,))
    results = generate(llm, batches)
    return {"batches": results, "planned": sorted(set(planned)), "gammas": gammas}


def generate_with_random_lookups(llm: Any, batches: list[dict[str, Any]], seed: int = 0) -> Any:
    """`generate` with lookups of random length, in which any token may be replaced."""
    llm.collective_rpc(inside_workers.look_up_at_random, args=(seed,))
    return generate(llm, batches)


def generate_with_cut_drafts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` with random lookups; only drafts with a high expected acceptance are verified."""
    llm.collective_rpc(inside_workers.look_up_at_random, args=(0,))
    llm.collective_rpc(inside_workers.cut_drafts, args=(0.5,))
    return generate(llm, batches)


def generate_without_unlikely_drafts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` with random lookups and a fixed number of drafts, of which unlikely ones are dropped."""
    llm.collective_rpc(inside_workers.look_up_at_random, args=(0,))
    llm.collective_rpc(inside_workers.leave_unlikely_out, args=(0.5,))
    return generate(llm, batches)


def generate_with_unchecked_ends(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` with one pass per round, after which random lookups are verified unchecked."""
    llm.collective_rpc(inside_workers.look_up_at_random, args=(0,))
    llm.collective_rpc(inside_workers.cut_drafts, args=(0.0, 1e9))
    return generate(llm, batches)


def served_answers(llm: Any) -> list[int]:
    """Return the tokens of all answers kept for lookups, with their separators."""
    return llm.collective_rpc(inside_workers.served_answers)[0]


def generate_with_waiting_drafts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` while the host waits for the device in every round of drafts; V2 runner."""
    llm.collective_rpc(inside_workers.wait_in_drafts)
    return generate(llm, batches)


def generate_under_faults(llm: Any, batches: list[dict[str, Any]], faults: list[str], file: str) -> Any:
    """`generate` under one fault after the other; also returns the increments of the plugin's counters.

    `engines.FAULT` names `file`. Pauses after failures end before the next fault.
    """
    results = []
    for fault in faults:
        llm.collective_rpc(inside_workers.forget_failures)
        Path(file).write_text(fault)
        results.append(_generate_and_count(llm, batches))
    return results


def generate_with_a_cut_file(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """`generate` after halving a file that the engine has mapped; also returns counter increments."""
    os.truncate(path, os.path.getsize(path) // 2)
    return _generate_and_count(llm, batches)


def _generate_and_count(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    before = metrics_of(llm)
    results = generate(llm, batches)
    counted = {
        name: value - before.get(name, 0)
        for name, value in metrics_of(llm).items()
        if name.startswith(("vllm:magicdec", "vllm:spec")) and isinstance(value, int | float)
    }
    return {"batches": results, "counted": counted}


def generate_and_draft_twice(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`, drafting every round with lookups and again by one pass per token over the same views.

    Returns counts: "drafts" compared; "rounds" of requests, and those with "different" drafts or, for
    the same drafts, with "other_logits" in V2's rejection sampler.
    """
    llm.collective_rpc(inside_workers.draft_twice)
    return {"batches": generate(llm, batches), **llm.collective_rpc(inside_workers.drafted_twice)[0]}


def generate_and_count_drafts(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`; also returns the numbers of drafted and accepted tokens."""

    def count() -> dict[str, int]:
        values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        return {what: values[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")}

    before, results, after = count(), generate(llm, batches), count()
    drafted, accepted = (after[what] - before[what] for what in ("draft", "accepted"))
    return {"batches": results, "drafted": drafted, "accepted": accepted}


def record_graphs(llm: Any, sizes: list[int]) -> None:
    """Replay draft steps from recorded graphs from now on; V2 runner on a CPU."""
    llm.collective_rpc(inside_workers.record_graphs, args=(sizes,))


def count_replays(llm: Any) -> dict[int, int]:
    """Count replays of recorded graphs by padded batch size; see `recorded_graphs.num_replays`."""
    return llm.collective_rpc(inside_workers.count_replays)[0]


def run_passes_as_captured(llm: Any) -> None:
    """Run the functions that CUDA graphs of wide passes capture, without graphs; V2 runner."""
    llm.collective_rpc(inside_workers.run_passes_as_captured)


def abort_half_while_decoding(llm: Any, batch: dict[str, Any], steps_before_abort: int) -> Any:
    """Abort every second request after some engine steps; return the others' tokens by index."""
    engine = llm.llm_engine
    for index, ids in enumerate(batch["prompts"]):
        engine.add_request(str(index), {"prompt_token_ids": ids}, _sampling_params(batch["sampling"]))
    tokens: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == steps_before_abort:
            engine.abort_request([str(i) for i in range(0, len(batch["prompts"]), 2)])
    return tokens


def generate_with_late_prompts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate`; a draft model catches up with prompts only when their requests decode."""
    llm.collective_rpc(inside_workers.read_prompts_late)
    return generate(llm, batches)


def watch_draft_cache(llm: Any) -> None:
    """Compare a draft model's KV cache with the target's in every round from now on.

    The target itself must be the draft model, with views of the whole context.
    """
    llm.collective_rpc(inside_workers.watch_draft_cache)


def watched_draft_cache(llm: Any) -> dict[str, float]:
    """Return the tokens compared, the largest difference, and the most catch-up tokens of a round."""
    return llm.collective_rpc(inside_workers.watched_draft_cache)[0]


def watch_spire_cache(llm: Any) -> None:
    """`watch_draft_cache` for a SPIRe draft; see spire_scenarios.py."""
    import spire_scenarios

    llm.collective_rpc(spire_scenarios.watch_cache)


def watched_spire_cache(llm: Any) -> dict[str, float]:
    """`watched_draft_cache` for a SPIRe draft: minimum of tokens and maximum difference over ranks."""
    import spire_scenarios

    ranks = llm.collective_rpc(spire_scenarios.watched_cache)
    return {
        "tokens": min(rank["tokens"] for rank in ranks),
        "difference": max(rank["difference"] for rank in ranks),
    }


def generate_with_adaptive_verification(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate` with free verification, then with expensive verification; V2 runner."""
    import adaptive_verification

    results = {}
    for name, token_cost in (("free", 0.0), ("expensive", 0.1)):
        llm.collective_rpc(adaptive_verification.verify_adaptively, args=(token_cost,))
        answers = generate(llm, batches)
        results[name] = {"batches": answers, **llm.collective_rpc(adaptive_verification.verified)[0]}
    return results


def generate_adaptively_with_broken_drafting(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate` with expensive verification and a policy that raises."""
    import adaptive_verification

    llm.collective_rpc(adaptive_verification.verify_adaptively, args=(0.1,))
    llm.collective_rpc(inside_workers.break_drafting)
    return {"batches": generate(llm, batches), **llm.collective_rpc(adaptive_verification.verified)[0]}


def adaptive_costs(llm: Any) -> tuple[float, float]:
    """Return vLLM's measured milliseconds of one request's drafts, and of verifying one token."""
    return llm.collective_rpc(inside_workers.adaptive_costs)[0]


def generate_with_broken_memory(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate` while writes of a SPIRe draft's memory raise."""
    import spire_scenarios

    llm.collective_rpc(spire_scenarios.break_memory)
    return generate(llm, batches)


def generate_and_note_spire_drafts(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """`generate`; saves the tokens and logits of a SPIRe draft to `path`."""
    import spire_scenarios

    llm.collective_rpc(spire_scenarios.write_norms_in_place)
    llm.collective_rpc(spire_scenarios.note_drafts)
    results = generate(llm, batches)
    llm.collective_rpc(spire_scenarios.save_drafts, args=(path,))
    return results


def chat(llm: Any, conversations: list[Any], sampling: dict[str, Any]) -> list[str]:
    outputs = llm.chat(conversations, _sampling_params(sampling), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def selections(llm: Any, prompts: list[list[int]], max_tokens: int = 4) -> list[dict[str, Any]]:
    """Return the selection of a token policy for each prompt, from the first worker."""
    from vllm import SamplingParams

    selected = []
    for prompt in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        selected.append(llm.collective_rpc(inside_workers.latest_selection)[0])
    return selected


def describe_draft(llm: Any) -> list[dict[str, Any]]:
    """Describe the draft of each worker."""
    return llm.collective_rpc(inside_workers.describe_draft)


def describe_attention(llm: Any) -> list[dict[str, Any]]:
    """Describe attention kernels and cache memory of each worker."""
    return llm.collective_rpc(inside_workers.describe_attention)


def score(llm: Any, texts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Return (logprob of the token, logprob of the best token) for every token after a prompt.

    Each of `texts` is {"prompt": token ids, "tokens": ids of the answer} and is scored in one pass.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": text["prompt"] + text["tokens"]} for text in texts]
    scores = []
    for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        logprobs = output.prompt_logprobs[len(text["prompt"]) :]
        scores.append(
            [
                (by_token[token].logprob, max(entry.logprob for entry in by_token.values()))
                for token, by_token in zip(text["tokens"], logprobs, strict=True)
            ]
        )
    return scores


def watch_draft_steps(llm: Any) -> None:
    """Count draft steps from now on; V2 runner."""
    llm.collective_rpc(inside_workers.watch_draft_steps)


def count_draft_steps(llm: Any) -> dict[str, int]:
    """Return the first worker's draft steps: "graph", of these with "flashinfer", and "eager"."""
    return llm.collective_rpc(inside_workers.count_draft_steps)[0]


def _prompt(given: Any) -> dict[str, Any]:
    """Convert a prompt from JSON to vLLM's format."""
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
    """Convert sampling parameters from JSON."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(fields)
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)


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
