# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines one after the other in a process that tests keep: `engines.run` is the other side.

A line on standard input names a specification and where the result goes; the answer is a line on standard
output, and all else is the log, on standard error. A process belongs to one environment (model runner,
Triton's interpreter, kernel library): importing vLLM takes longer than starting an engine.
"""

import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from vllm_magicdec.errors import MagicDecConfigError


def generate(llm: Any, batches: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each batch {"prompts": [...], "sampling": {...} or a list of them} is submitted at once.

    "adapters": of each request a LoRA adapter's number and folder, or None; loaded when it first comes.
    A prompt is token ids, or {"tokens": ids, "image": [{"width", "height", "seed"}, ...]} with noise for
    pictures, or "video" with "frames" in addition.
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


def generate_without_asking_for_drafts(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """The engine core must not call its workers for drafts: these come with the outputs."""

    def ask() -> None:
        raise AssertionError("the workers were asked for drafts")

    llm.llm_engine.engine_core.engine_core.model_executor.take_draft_token_ids = ask
    return generate(llm, batches)


def generate_with_broken_drafting(llm: Any, batches: list[dict[str, Any]], rank: int | None = None) -> Any:
    """From now on the draft's policy raises, in one worker or in every one."""
    llm.collective_rpc(_break_drafting, args=(rank,))
    return generate(llm, batches)


def generate_and_note_inputs(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`, and what the target was given meanwhile, by vLLM and by the draft, and where it lay."""
    llm.collective_rpc(_note_inputs)
    return {"batches": generate(llm, batches), "inputs": llm.collective_rpc(_noted_inputs)[0]}


def generate_and_note_saves(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`, and how often a KV connector was shown steps, and each layer to save, meanwhile."""
    llm.collective_rpc(_note_saves)
    results = generate(llm, batches)
    steps, saves = llm.collective_rpc(_noted_saves)[0]
    return {"batches": results, "steps": steps, "saves": saves}


def generate_with_broken_acceptance(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """From now on drafts sampled from q are verified as if they had been sampled uniformly."""
    llm.collective_rpc(_believe_in_uniform_drafts)
    return generate(llm, batches)


def generate_with_random_choices(llm: Any, batches: list[dict[str, Any]], seed: int) -> Any:
    """From now on the controller of `auto` chooses at random, and cuts each request's drafts at random.

    With lookups it also says at random what drafts are worth. The engine core must be in this process.
    """
    from vllm_magicdec.adaptive.controller import PLAIN, Choice
    from vllm_magicdec.adaptive.draft_plan import DraftPlan
    from vllm_magicdec.adaptive.lookup_controller import LookupController

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    controller = scheduler._controller
    budgets = controller.budgets
    rng, chosen, kept, is_plain = random.Random(seed), [], [], []
    schedule = type(scheduler).schedule

    def choose(num_reqs: int, context_tokens: int) -> Choice:
        # Often 0, so that steps without any drafts follow on one another.
        if isinstance(controller, LookupController):
            drafts = Choice(controller.lengths[-1], rng.choice([*budgets, 0]))
            chosen.append(rng.choice([PLAIN, drafts]))
        else:
            drafts = rng.choice([0, rng.randint(0, scheduler.num_spec_tokens)])
            chosen.append(Choice(drafts, rng.choice(budgets)))
        return chosen[-1]

    def plan(choice: Choice) -> DraftPlan:
        least_promise = rng.choice([0.0, 2.0, 8.0, float("inf")])
        return DraftPlan(*choice, rng.uniform(0.0, 0.9), rng.uniform(0.0, 4.0), least_promise)

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        if output.num_scheduled_tokens:
            is_plain.append(not (output.scheduled_spec_decode_tokens or output.num_spec_tokens_to_schedule))
        return output

    def keep(req_id: str, drafted: int, least_chance: float) -> int:
        kept.append(rng.randint(0, drafted))
        return kept[-1]

    controller.choose = choose
    if isinstance(controller, LookupController):
        controller.plan = plan
    scheduler._request_lengths.keep = keep
    scheduler.schedule = schedule_and_note
    llm.collective_rpc(_note_sizes)
    llm.collective_rpc(_note_speculative_steps)
    results = generate(llm, batches)
    return {
        "plain_steps": sum(is_plain),
        "speculative_steps": len(is_plain) - sum(is_plain),
        "sampled_as_speculative": llm.collective_rpc(_noted_speculative_steps)[0],
        "lengths": sorted({choice.drafts for choice in chosen}),
        "budgets": list(budgets),
        "sizes": [budgets.index(choice.budget) for choice in chosen if choice.budget and choice.drafts],
        "sizes_drafted": llm.collective_rpc(_noted_sizes)[0],
        "kept": sorted(set(kept)),
        "batches": results,
    }


def generate_with_random_lookups(llm: Any, batches: list[dict[str, Any]], seed: int = 0) -> Any:
    """From now on lookups are of any length, and any of their tokens may be another one."""
    llm.collective_rpc(_look_up_at_random, args=(seed,))
    return generate(llm, batches)


def generate_with_cut_drafts(llm: Any, batches: list[dict[str, Any]], least_chance: float = 0.5) -> Any:
    """From now on lookups are random, and of what is drafted with them only the surest is verified."""
    llm.collective_rpc(_look_up_at_random, args=(0,))
    llm.collective_rpc(_cut_drafts, args=(least_chance,))
    return generate(llm, batches)


def generate_with_unread_ends(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """From now on a round has one pass, and what random lookups say then is verified unread."""
    llm.collective_rpc(_look_up_at_random, args=(0,))
    llm.collective_rpc(_cut_drafts, args=(0.0, 1e9))
    return generate(llm, batches)


def served_answers(llm: Any) -> list[int]:
    """The tokens of all answers that lookups keep, with what separates them."""
    return llm.collective_rpc(_served_answers)[0]


def generate_with_broken_lookups(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """From now on every lookup raises."""
    llm.collective_rpc(_break_lookups)
    return generate(llm, batches)


def generate_under_faults(llm: Any, batches: list[dict[str, Any]], faults: list[str], file: str) -> Any:
    """`generate` under one fault after the other, and what it added to the plugin's counters.

    `file` is what VLLM_MAGICDEC_FAULT names. Pauses after failures do not last from one fault to the next.
    """
    results = []
    for fault in faults:
        llm.collective_rpc(_forget_failures)
        Path(file).write_text(fault)
        results.append(_generate_and_count(llm, batches))
    return results


def generate_with_a_cut_file(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """A file is cut to half its size under the engine; with what that added to the plugin's counters."""
    os.truncate(path, os.path.getsize(path) // 2)
    return _generate_and_count(llm, batches)


def _generate_and_count(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    before = _metrics_of(llm)
    results = generate(llm, batches)
    counted = {
        name: value - before.get(name, 0)
        for name, value in _metrics_of(llm).items()
        if name.startswith(("vllm:magicdec", "vllm:spec")) and isinstance(value, int | float)
    }
    return {"batches": results, "counted": counted}


def generate_and_draft_twice(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """From now on every round is drafted with lookups and then by one pass per token over the same views.

    "drafts": those that are used; "different": requests' rounds in which the two differ, of "rounds";
    "other_logits": those in which V2's rejection sampler would read others of the same drafts.
    """
    llm.collective_rpc(_draft_twice)
    return {"batches": generate(llm, batches), **llm.collective_rpc(_drafted_twice)[0]}


def generate_with_broken_controller(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """After a few choices the controller of `auto` raises; the engine core must be in this process."""
    controller = llm.llm_engine.engine_core.engine_core.scheduler._controller
    choose, left = controller.choose, iter(range(10))

    def choose_for_a_while(num_reqs: int, context_tokens: int) -> Any:
        if next(left, None) is None:
            raise RuntimeError("broken on purpose")
        return choose(num_reqs, context_tokens)

    controller.choose = choose_for_a_while
    return generate(llm, batches)


def generate_and_count_drafts(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate`, and how many tokens were drafted and accepted meanwhile."""

    def count() -> dict[str, int]:
        values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        return {what: values[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")}

    before, results, after = count(), generate(llm, batches), count()
    drafted, accepted = (after[what] - before[what] for what in ("draft", "accepted"))
    return {"batches": results, "drafted": drafted, "accepted": accepted}


def record_graphs(llm: Any, sizes: list[int]) -> None:
    """From now on draft steps are replayed from recorded graphs; V2 runner on a CPU."""
    llm.collective_rpc(_record_graphs, args=(sizes,))


def count_replays(llm: Any) -> dict[int, int]:
    """Replays of recorded graphs by padded batch size, and of those of a draft model's first steps."""
    return llm.collective_rpc(_count_replays)[0]


def run_passes_as_captured(llm: Any) -> None:
    """From now on wide passes run what a CUDA graph of them would be captured of; V2 runner."""
    llm.collective_rpc(_run_passes_as_captured)


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
    """From now on a draft model reads no prompt before its request decodes."""
    llm.collective_rpc(_read_prompts_late)
    return generate(llm, batches)


def watch_draft_cache(llm: Any) -> None:
    """From now on compare, in every round, what a draft model's cache holds with the target's.

    Only where the target itself is the draft model. Over a view of the whole context in all layers, of the
    tokens that a ring holds of a longer one in the first.
    """
    llm.collective_rpc(_watch_draft_cache)


def watched_draft_cache(llm: Any) -> dict[str, float]:
    """Tokens compared and the largest difference; most tokens that a round's first pass had to read."""
    return llm.collective_rpc(_watched_draft_cache)[0]


def watch_spire_cache(llm: Any) -> None:
    """As `watch_draft_cache`, of a SPIRe draft; see spire_scenarios.py."""
    import spire_scenarios

    llm.collective_rpc(spire_scenarios.watch_cache)


def watched_spire_cache(llm: Any) -> dict[str, float]:
    """As `watched_draft_cache`; of all ranks the fewest tokens and the largest difference."""
    import spire_scenarios

    ranks = llm.collective_rpc(spire_scenarios.watched_cache)
    return {
        "tokens": min(rank["tokens"] for rank in ranks),
        "difference": max(rank["difference"] for rank in ranks),
    }


def measure_prompts(llm: Any, contexts: list[int]) -> dict[str, Any]:
    """Rows of `magicdec profile`; of every round that could draft, is it of parts of prompts, and passes.

    The engine core must be in this process.
    """
    from vllm_magicdec.planner import profile

    llm.collective_rpc(_note_passes)
    rows = profile.measure_prompts(llm, contexts)
    return {"rows": rows, "rounds": llm.collective_rpc(_noted_passes)[0]}


def generate_with_adaptive_verification(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate` while verifying is free, and while vLLM leaves out what is not worth it; V2 runner."""
    import adaptive_verification

    results = {}
    for name, token_cost in (("free", 0.0), ("dear", 0.1)):
        llm.collective_rpc(adaptive_verification.verify_adaptively, args=(token_cost,))
        answers = generate(llm, batches)
        results[name] = {"batches": answers, **llm.collective_rpc(adaptive_verification.verified)[0]}
    return results


def generate_adaptively_with_broken_drafting(llm: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """`generate` while vLLM leaves out what is not worth it, and the draft's policy raises."""
    import adaptive_verification

    llm.collective_rpc(adaptive_verification.verify_adaptively, args=(0.1,))
    llm.collective_rpc(_break_drafting, args=(None,))
    return {"batches": generate(llm, batches), **llm.collective_rpc(adaptive_verification.verified)[0]}


def adaptive_costs(llm: Any) -> tuple[float, float]:
    """What vLLM measured: milliseconds of a request's drafts, and of verifying a token."""
    return llm.collective_rpc(_adaptive_costs)[0]


def generate_with_broken_memory(llm: Any, batches: list[dict[str, Any]]) -> Any:
    """`generate`, while a SPIRe draft's memory cannot be written."""
    import spire_scenarios

    llm.collective_rpc(spire_scenarios.break_memory)
    return generate(llm, batches)


def generate_and_note_spire_drafts(llm: Any, batches: list[dict[str, Any]], path: str) -> Any:
    """`generate`; what a SPIRe draft computed goes to a file."""
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
    """What a token policy selected for each prompt, on the first worker."""
    from vllm import SamplingParams

    selected = []
    for prompt in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        selected.append(llm.collective_rpc(_latest_selection)[0])
    return selected


def describe_draft(llm: Any) -> list[dict[str, Any]]:
    """What the draft holds of its own, per worker."""
    return llm.collective_rpc(_describe_draft)


def describe_attention(llm: Any) -> list[dict[str, Any]]:
    """Whose attention the layers have, and where their caches lie, per worker."""
    return llm.collective_rpc(_describe_attention)


def score(llm: Any, texts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Of every token that follows a prompt, its logprob and the best token's, from one pass over all of it.

    `texts`: {"prompt": token ids, "tokens": those that follow}.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": text["prompt"] + text["tokens"]} for text in texts]
    scores = []
    for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        places = output.prompt_logprobs[len(text["prompt"]) :]
        scores.append(
            [
                (place[token].logprob, max(entry.logprob for entry in place.values()))
                for token, place in zip(text["tokens"], places, strict=True)
            ]
        )
    return scores


def watch_draft_steps(llm: Any) -> None:
    """From now on the draft steps of the first worker are counted; V2 runner."""
    llm.collective_rpc(_watch_draft_steps)


def count_draft_steps(llm: Any) -> dict[str, int]:
    """By how they ran: "graph", a CUDA graph; "flashinfer", those of them in which it reads; "eager"."""
    return llm.collective_rpc(_count_draft_steps)[0]


def _prompt(given: Any) -> dict[str, Any]:
    """vLLM's form of a prompt that came through JSON."""
    if isinstance(given, list):
        return {"prompt_token_ids": given}
    seen = {kind: [_noise(**one) for one in given[kind]] for kind in ("image", "video") if kind in given}
    return {"prompt_token_ids": given["tokens"], "multi_modal_data": seen}


def _noise(width: int, height: int, seed: int, frames: int = 0) -> Any:
    """A picture, or as many frames of a film."""
    import numpy as np
    from PIL import Image

    shape = (frames, height, width, 3) if frames else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return pixels if frames else Image.fromarray(pixels)


def _sampling_params(fields: dict[str, Any]) -> Any:
    """vLLM's object for what came through JSON."""
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


def _draft_of(worker: Any) -> Any:
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or runner.speculator


def _latest_selection(worker: Any) -> dict[str, Any]:
    selections = _draft_of(worker)._drafter._views[0]._selections
    row = selections.rows([list(selections._made_at)[-1]])
    count = int(selections.counts[row])
    return {
        "end": int(selections.ends[row]),
        "positions": selections.positions[row][0, ..., :count].tolist(),
    }


def _note_sizes(worker: Any) -> None:
    """Note which budget each round of drafts is made with."""
    views = _draft_of(worker)._drafter._views[0]
    views.noted, prepare = [], type(views).prepare

    def prepare_and_note(batch, num_steps, size=-1):
        views.noted.append(size)
        return prepare(views, batch, num_steps, size)

    views.prepare = prepare_and_note


def _noted_sizes(worker: Any) -> list[int]:
    return _draft_of(worker)._drafter._views[0].noted


def _note_speculative_steps(worker: Any) -> None:
    """Count the steps that the V1 runner samples as those of speculation."""
    sampler = worker.model_runner.rejection_sampler
    if worker.vllm_config.use_v2_model_runner:
        sampler.noted = None
        return
    sampler.noted, forward = 0, type(sampler).forward

    def forward_and_note(*args, **kwargs):
        sampler.noted += 1
        return forward(sampler, *args, **kwargs)

    sampler.forward = forward_and_note


def _noted_speculative_steps(worker: Any) -> int | None:
    return worker.model_runner.rejection_sampler.noted


def _look_up_at_random(worker: Any, seed: int) -> None:
    from vllm_magicdec.lookup.continuation import Continuation

    drafter, rng = _draft_of(worker)._drafter, random.Random(seed)
    if drafter._wide is not None:
        _look_up_on_device_at_random(drafter._wide, rng, worker.model_config.get_vocab_size())
        return
    lookups = drafter._staged._lookups
    own, vocab_size = lookups.look_up, worker.model_config.get_vocab_size()

    def look_up(req_id: str, drafted: list[int], most: int, *least_chance: float) -> Continuation:
        found = own(req_id, drafted, most, *least_chance).tokens
        tokens = [
            found[place] if place < len(found) and rng.random() < 0.8 else rng.randrange(vocab_size)
            for place in range(rng.randint(0, max(0, most)))
        ]
        return Continuation(tokens, [0.5] * len(tokens))

    lookups.look_up = look_up


def _look_up_on_device_at_random(wide: Any, rng: random.Random, vocab_size: int) -> None:
    """And any number of passes, none included."""
    import torch

    own, generator = wide._lookups.fill, torch.Generator().manual_seed(rng.randrange(2**31))

    def fill(given: Any, made: Any, texts: Any) -> Any:
        is_found = own(given, made, texts)
        other = torch.randint(0, vocab_size, given.shape, dtype=torch.int32, generator=generator)
        is_other = torch.rand(given.shape, generator=generator) > 0.8
        is_other &= torch.arange(given.shape[1]) > made.unsqueeze(1)
        given.copy_(torch.where(is_other, other, given))
        return is_found

    wide._lookups.fill = fill
    for num_steps, gains in wide._gains.items():
        gains.next = lambda most=num_steps: rng.randint(0, most)
        gains.learn = gains.look = lambda *told: None


def _cut_drafts(worker: Any, least_chance: float, least_gain: float = 0.0) -> None:
    """As a controller's plan does."""
    from vllm_magicdec.adaptive.draft_plan import DraftPlan

    staged = _draft_of(worker)._drafter._staged
    draft = staged.draft

    def draft_by_plan(batch: Any, num_steps: int, prepare: Any) -> Any:
        return draft(batch, DraftPlan(num_steps, 1, least_chance, least_gain), prepare)

    staged.draft = draft_by_plan


def _served_answers(worker: Any) -> list[int]:
    served = _draft_of(worker)._drafter._staged._lookups._sources["served"]
    return [*served._older.tokens.tolist(), *served._newer.tokens.tolist()]


def _break_lookups(worker: Any) -> None:
    def look_up(*args: Any) -> Any:
        raise RuntimeError("broken on purpose")

    _draft_of(worker)._drafter._staged._lookups.look_up = look_up


def _forget_failures(worker: Any) -> None:
    from vllm_magicdec.drafting.pauses import Pauses

    drafter = _draft_of(worker)._drafter
    drafter._pauses = Pauses("Drafting", "steps go on without useful drafts")
    if drafter._staged is not None:
        drafter._staged._lookup_pauses = Pauses("A lookup", "every draft takes a pass of its own")
    if drafter._wide is not None:
        drafter._wide._pauses = Pauses("A lookup", "every draft takes a pass of its own")


def _draft_twice(worker: Any) -> None:
    from collections import Counter

    import torch

    from vllm_magicdec.views.base import DraftStep

    runner = _draft_of(worker)
    drafter = runner._drafter
    compared = Counter(drafts=0, rounds=0, different=0, other_logits=0, not_kept=0, passes=0)
    read = (
        runner.draft_logits if worker.vllm_config.use_v2_model_runner else None
    )  # None also: greedy drafts

    def fill_twice(drafts: torch.Tensor, batch: Any, num_steps: int) -> None:
        prepared = [
            views.prepare(batch.of_group(group.kv_cache_group), num_steps)
            for group, views in zip(drafter.groups, drafter._views, strict=True)
        ]
        staged = drafter._staged.draft(batch, num_steps, lambda: prepared)
        drafter.draft_lists = staged
        logits = None if read is None else read.clone()
        tokens, one_by_one = batch.tokens, torch.zeros_like(drafts)
        for parts in zip(*prepared, strict=True):
            step = DraftStep(parts)
            tokens = runner.draft_step(tokens.to(torch.int32), step)
            one_by_one[:, step.index] = tokens
        for index, context_len in enumerate(batch.context_lens.tolist()):
            if not batch.is_prefilling[index]:
                used = min(num_steps, runner.max_model_len - context_len)
                if not worker.vllm_config.use_v2_model_runner:
                    assert staged[index]
                    used = min(used, len(staged[index]))  # passes that gain too little are left out
                same = staged[index] == one_by_one[index, :used].tolist()
                compared.update(drafts=used, rounds=1, different=not same)
                if logits is not None and same:
                    row = runner.idx_mapping[index]
                    both = logits[row, :used], read[row, :used]
                    compared.update(other_logits=not torch.allclose(*both, rtol=1e-4, atol=1e-4))

    latest: list[torch.Tensor] = []
    if read is not None:
        compute = runner.compute_draft_logits

        def compute_and_note(*args: Any) -> torch.Tensor:
            latest[:] = [compute(*args)]
            return latest[0]

        runner.compute_draft_logits = compute_and_note

    def fill_widely_twice(drafts: torch.Tensor, batch: Any, num_steps: int) -> None:
        num_passes = drafter._wide.begin_round(batch, num_steps)
        drafter.takes_passes = num_passes > 0
        prepared = drafter._prepare(batch, num_steps)
        num_passes = drafter._wide.draft(drafts, batch, prepared, num_passes)
        logits = None if read is None else read.clone()
        if num_passes and logits is not None:
            # Of every place what its token was drawn from, the stand-ins' as well.
            of_drafts = latest[-1].view(*drafts.shape, -1)
            for index, is_prefilling in enumerate(batch.is_prefilling):
                if not is_prefilling:
                    kept = logits[runner.idx_mapping[index], :num_steps]
                    compared.update(not_kept=not torch.equal(kept, of_drafts[index]))
        tokens, one_by_one = batch.tokens, torch.zeros_like(drafts)
        for parts in zip(*prepared, strict=True):
            step = DraftStep(parts)
            tokens = runner.draft_step(tokens.to(torch.int32), step)
            one_by_one[:, step.index] = tokens
        if drafter._own_cache is not None:
            drafter._own_cache.end_round(batch, one_by_one)
        if not num_passes:
            drafts.copy_(one_by_one)
            return
        for index in range(len(drafts)):
            if batch.is_prefilling[index]:
                continue
            same = torch.equal(drafts[index, :num_passes], one_by_one[index, :num_passes])
            compared.update(drafts=num_passes, rounds=1, different=not same, passes=num_passes)
            if logits is not None and same:
                row = runner.idx_mapping[index]
                both = logits[row, :num_passes], read[row, :num_passes]
                compared.update(other_logits=not torch.allclose(*both, rtol=1e-4, atol=1e-4))
        if logits is not None:
            read.copy_(logits)

    drafter._fill = fill_twice if drafter._wide is None else fill_widely_twice
    drafter.compared = compared


def _drafted_twice(worker: Any) -> dict[str, int]:
    return dict(_draft_of(worker)._drafter.compared)


def _note_inputs(worker: Any) -> None:
    noted = worker.noted_inputs = set()

    def note(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        given = {name: value for name, value in inputs.items() if value is not None}
        noted.add(tuple(sorted((name, value.data_ptr()) for name, value in given.items())))

    worker.model_runner.get_model().register_forward_pre_hook(note, with_kwargs=True)


def _noted_inputs(worker: Any) -> list[list[tuple[str, int]]]:
    return sorted(worker.noted_inputs)


def _note_saves(worker: Any) -> None:
    from collections import Counter

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    worker.noted_steps, worker.noted_saves = [], Counter()
    bind, save = connector.bind_connector_metadata, connector.save_kv_layer

    def bind_and_note(metadata: Any) -> None:
        worker.noted_steps.append(metadata)
        bind(metadata)

    def save_and_note(layer_name: str, *args: Any, **kwargs: Any) -> None:
        worker.noted_saves[layer_name] += 1
        save(layer_name, *args, **kwargs)

    connector.bind_connector_metadata, connector.save_kv_layer = bind_and_note, save_and_note


def _noted_saves(worker: Any) -> tuple[int, list[int]]:
    return len(worker.noted_steps), list(worker.noted_saves.values())


def _watch_draft_cache(worker: Any) -> None:
    import numpy as np
    import torch

    from vllm_magicdec.attention.rows import KVRows

    proposer = _draft_of(worker)
    cache, layers = proposer._drafting, worker.model_runner.compilation_config.static_forward_context
    seen = worker._draft_cache = {"tokens": 0, "difference": 0.0, "rounds": 0, "leading": 0}
    catch_up = cache.catch_up

    def rows_of(name: str) -> Any:
        layer = layers[name]
        isa = getattr(layer.impl, "isa", None) or getattr(layer, "isa", None)
        return KVRows.of(layer.kv_cache, layer.get_attn_backend().get_name(), isa)

    def held_on_v1(batch: Any) -> list[tuple[Any, Any, Any]]:
        seen["leading"] = max(seen["leading"], cache.num_leading)
        table = worker.model_runner.input_batch.block_table.block_tables[0].block_table.np
        held = []
        for index, end in enumerate(cache._ends):
            entries = cache.pages.entries(end)
            entries = entries[: len(entries) - len(cache.pages.lacking(index, end))]
            own = cache.pages.pages(index, entries // cache.pages.page_size, proposer.groups[0])
            held.append((entries, own, table[index, entries // cache.pages.page_size]))
        return held

    def held_on_v2(batch: Any) -> list[tuple[Any, Any, Any]]:
        leads, lacking = cache._leads, cache._lacking[cache._rows]
        seen["leading"] = max(seen["leading"], 0 if leads is None else int(leads.sum()))
        seen["lag"] = max(seen.get("lag", 0), int(lacking.max()))
        table = batch.block_tables[cache._speculator.groups[0].kv_cache_group].numpy()
        targets = proposer.block_tables.input_block_tables[0].numpy()
        gaps = cache.pages.gaps(batch.context_lens)
        ends = ((batch.context_lens - gaps).numpy() - lacking).clip(min=0)
        held = []
        for own, target, gap, end in zip(table, targets, gaps, ends.tolist(), strict=False):
            entries = cache.pages.positions(torch.arange(end), gap.expand(end)).numpy()
            pages = entries // cache._page_size
            held.append((entries, own[pages], target[pages]))
        return held

    is_v2 = worker.vllm_config.use_v2_model_runner
    names = sorted(cache.layer_names if is_v2 else proposer._draft_attn_layer_names)
    size = cache._page_size if is_v2 else cache.pages.page_size

    def catch_up_and_compare(batch: Any, num_steps: int) -> None:
        catch_up(batch, num_steps)
        seen["rounds"] += 1
        for places, *pages in held_on_v2(batch) if is_v2 else held_on_v1(batch):
            if not len(places):
                continue
            slots = [torch.from_numpy(own.astype(np.int64) * size + places % size) for own in pages]
            is_whole = places[-1] + 1 == len(places)
            # What the first layer writes depends on a token and its position, whatever is in view.
            for name in names if is_whole else [next(name for name in names if "layers.0." in name)]:
                caches = [rows_of(name), rows_of(name.removeprefix("draft_model."))]
                by_head = [own.expand(caches[0].num_kv_heads, -1) for own in slots]
                for part in ("keys", "values"):
                    own, theirs = (
                        getattr(rows, part).gather(at) for rows, at in zip(caches, by_head, strict=True)
                    )
                    seen["difference"] = max(seen["difference"], float((own - theirs).abs().max()))
            seen["tokens"] += len(places)
            seen["sparse"] = seen.get("sparse", 0) + (0 if is_whole else len(places))

    cache.catch_up = catch_up_and_compare


def _note_passes(worker: Any) -> None:
    runner = _draft_of(worker)
    fill, draft_step = runner._drafter._fill, runner.draft_step
    worker._rounds = []

    def fill_and_note(drafts: Any, batch: Any, num_steps: int) -> bool:
        if num_steps:
            worker._rounds.append([all(batch.is_prefilling), 0])
        return fill(drafts, batch, num_steps)

    def step_and_note(*args: Any) -> Any:
        worker._rounds[-1][1] += 1
        return draft_step(*args)

    runner._drafter._fill, runner.draft_step = fill_and_note, step_and_note


def _noted_passes(worker: Any) -> list[tuple[bool, int]]:
    return [(bool(is_part), passes) for is_part, passes in worker._rounds]


def _read_prompts_late(worker: Any) -> None:
    cache = _draft_of(worker)._drafting
    catch_up = cache.catch_up

    def catch_up_late(batch: Any, num_steps: int) -> None:
        if not any(batch.is_prefilling):
            catch_up(batch, num_steps)

    cache.catch_up = catch_up_late


def _watched_draft_cache(worker: Any) -> dict[str, float]:
    return worker._draft_cache


def _adaptive_costs(worker: Any) -> tuple[float, float]:
    of_drafts, of_verification = worker.model_runner.adaptive_verification.cost_tables
    return float(of_drafts[1]), float(of_verification[1])


def _break_drafting(worker: Any, rank: int | None) -> None:
    if rank not in (None, worker.rank):
        return

    def choose_pages(context_lens, last_pages):
        raise RuntimeError("broken on purpose")

    for policy in _draft_of(worker)._drafter._views[0]._policies:
        policy.choose_pages = choose_pages


def _record_graphs(worker: Any, sizes: list[int]) -> None:
    import recorded_graphs

    recorded_graphs.capture(_draft_of(worker), sizes)


def _run_passes_as_captured(worker: Any) -> None:
    from types import SimpleNamespace

    from vllm_magicdec.vllm_api.draft_graphs import RoundGraphs

    runner = _draft_of(worker)

    def replay(tokens: Any, step: Any, num_adapters: int) -> Any:
        return runner.forward_and_draw(tokens, step, runner.step_metadata(step))

    as_captured = SimpleNamespace(replay=replay, graphs={None: None}, max_captured_reqs=4)
    runner._graphs = RoundGraphs(passes=dict.fromkeys(runner.speculative_config.round_lengths, as_captured))


def _count_replays(worker: Any) -> dict[int, int]:
    import recorded_graphs

    return recorded_graphs.num_replays(_draft_of(worker))


def _watch_draft_steps(worker: Any) -> None:
    draft = _draft_of(worker)
    draft.steps_seen = {"graph": 0, "flashinfer": 0, "eager": 0}
    forward = draft.forward_and_sample

    def forward_and_count(*args: Any) -> Any:
        draft.steps_seen["eager"] += 1
        return forward(*args)

    draft.forward_and_sample = forward_and_count
    draw = draft.forward_and_draw

    def draw_and_count(*args: Any) -> Any:
        draft.steps_seen["eager"] += 1
        return draw(*args)

    draft.forward_and_draw = draw_and_count

    def count_graphs_of(graphs: Any) -> None:
        run_fullgraph = graphs.run_fullgraph

        def run_and_count(desc: Any) -> Any:
            draft.steps_seen["graph"] += 1
            # Where FlashInfer is not used, no graph is made for views of a common length.
            draft.steps_seen["flashinfer"] += desc.common_len is not None
            return run_fullgraph(desc)

        graphs.run_fullgraph = run_and_count

    for graphs in draft._graphs._every:
        count_graphs_of(graphs)


def _count_draft_steps(worker: Any) -> dict[str, int]:
    return _draft_of(worker).steps_seen


def _believe_in_uniform_drafts(worker: Any) -> None:
    runner = worker.model_runner
    true_probs = runner._get_spec_decode_draft_probs

    def uniform_probs(metadata):
        probs = true_probs(metadata)
        return None if probs is None else probs.new_full(probs.shape, 1 / probs.shape[-1])

    runner._get_spec_decode_draft_probs = uniform_probs


def _describe_attention(worker: Any) -> dict[str, Any]:
    import huge_memory
    import torch
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from vllm_magicdec.attention.native_attention import native_of

    context = worker.vllm_config.compilation_config.static_forward_context
    caches = [getattr(layer, "kv_cache", None) for layer in context.values()]
    on_cpu = [
        cache for cache in caches if isinstance(cache, torch.Tensor) and cache.is_cpu and cache.numel()
    ]
    return {
        "in_huge_pages": huge_memory.share_in_huge_pages(on_cpu[0]) if on_cpu else 0.0,
        "native_layers": sum(
            native_of(layer.impl) is not None for layer in context.values() if hasattr(layer, "impl")
        ),
        "attention_layers": len(get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)),
    }


def _describe_draft(worker: Any) -> dict[str, Any]:
    draft = _draft_of(worker)
    return {
        **_describe_attention(worker),
        "class": type(draft).__name__,
        "model_is_target": draft.model is worker.model_runner.get_model(),
    }


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        generate,
        describe_attention,
        measure_prompts,
        generate_without_asking_for_drafts,
        generate_with_broken_drafting,
        generate_with_late_prompts,
        generate_with_broken_acceptance,
        generate_with_random_choices,
        generate_with_random_lookups,
        generate_with_cut_drafts,
        generate_with_unread_ends,
        served_answers,
        generate_with_broken_lookups,
        generate_under_faults,
        generate_with_a_cut_file,
        generate_and_draft_twice,
        generate_with_broken_controller,
        generate_and_count_drafts,
        generate_and_note_inputs,
        generate_and_note_saves,
        record_graphs,
        count_replays,
        run_passes_as_captured,
        abort_half_while_decoding,
        watch_draft_cache,
        watched_draft_cache,
        watch_spire_cache,
        watched_spire_cache,
        generate_and_note_spire_drafts,
        generate_with_adaptive_verification,
        generate_adaptively_with_broken_drafting,
        adaptive_costs,
        generate_with_broken_memory,
        chat,
        selections,
        score,
        watch_draft_steps,
        count_draft_steps,
        describe_draft,
    )
}


def run_engine(spec: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, run the scenarios, end the engine; returns `engines.EngineRun` but for its log."""
    from vllm import LLM

    os.environ["VLLM_MAGICDEC_STRICT"] = "1" if spec["strict"] else "0"
    if os.environ.get("MAGICDEC_TEST_TOKENS_ON_DEVICE"):
        from vllm_magicdec.vllm_api import engine_config

        # As on a GPU.
        engine_config.are_tokens_on_device_alone = lambda config: config.use_v2_model_runner
    llm = LLM(**spec["engine"])
    results = [SCENARIOS[step["scenario"]](llm, **step["arguments"]) for step in spec["steps"]]
    metrics = _metrics_of(llm)
    config = llm.llm_engine.vllm_config
    run = {
        "results": results,
        "metrics": metrics,
        "num_kv_blocks": config.cache_config.num_gpu_blocks,
        "num_lookahead_tokens": config.num_lookahead_tokens,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2_runner": config.use_v2_model_runner,
        "kernel_libraries": sorted(set(llm.collective_rpc(_kernel_library))),
    }
    llm.llm_engine.engine_core.shutdown()
    return run


def _metrics_of(llm: Any) -> dict[str, Any]:
    """By name, and by what they count where they say that."""
    return {
        f"{metric.name}:{metric.labels['what']}" if "what" in metric.labels else metric.name: getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
    }


def _kernel_library(worker: Any) -> str:
    import kernel_libraries

    return kernel_libraries.loaded()


def _clean_up() -> None:
    """Leave nothing of an engine to the next one."""
    from vllm import logger
    from vllm.distributed import cleanup_dist_env_and_memory

    logger._print_info_once.cache_clear()  # the next one's log has to say everything
    logger._print_warning_once.cache_clear()
    if "recorded_graphs" in sys.modules:
        sys.modules["recorded_graphs"].uninstall()
    gc.collect()
    cleanup_dist_env_and_memory()


def _end_with(parent: int) -> None:
    """When the tests are gone, end this process with all of its children."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until standard input ends, or a scenario fails: then what it left behind is not known."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        spec_path, result_path = json.loads(line)
        try:
            run = run_engine(json.loads(Path(spec_path).read_text()))
        except MagicDecConfigError as error:  # a worker's, too: it is in this process
            run = {"refusal": str(error)}
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            print("failed", file=answers, flush=True)
            os._exit(1)
        _clean_up()
        Path(result_path).write_text(json.dumps(run))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
