# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run inside workers: scenarios.py calls them by `collective_rpc`."""

import random
from typing import Any


def draft_of(worker: Any) -> Any:
    """Return the drafter of the V1 runner or the speculator of the V2 runner."""
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or runner.speculator


def latest_selection(worker: Any) -> dict[str, Any]:
    selections = draft_of(worker)._drafter._views[0]._selections
    row = selections.rows([list(selections._selected_at)[-1]])
    count = int(selections.counts[row])
    return {
        "end": int(selections.ends[row]),
        "positions": selections.positions[row][0, ..., :count].tolist(),
    }


def note_speculative_steps(worker: Any) -> None:
    """Count the calls of the V1 runner's rejection sampler."""
    sampler = worker.model_runner.rejection_sampler
    if worker.vllm_config.use_v2_model_runner:
        sampler.num_calls = None
        return
    sampler.num_calls, forward = 0, type(sampler).forward

    def forward_and_count(*args, **kwargs):
        sampler.num_calls += 1
        return forward(sampler, *args, **kwargs)

    sampler.forward = forward_and_count


def noted_speculative_steps(worker: Any) -> int | None:
    return worker.model_runner.rejection_sampler.num_calls


def look_up_at_random(worker: Any, seed: int) -> None:
    from vllm_magicdec.lookup.continuation import Continuation

    drafter, rng = draft_of(worker)._drafter, random.Random(seed)
    if drafter._wide is not None:
        _look_up_on_device_at_random(drafter._wide, rng, worker.model_config.get_vocab_size())
        return
    drafter._staged._min_acceptance = 0.0  # random lookups contradict whatever is drafted
    lookups = drafter._staged._lookups
    own, vocab_size = lookups.look_up, worker.model_config.get_vocab_size()

    def look_up(req_id: str, drafted: list[int], most: int, *min_acceptance: float) -> Continuation:
        found = own(req_id, drafted, most, *min_acceptance).tokens
        tokens = [
            found[i] if i < len(found) and rng.random() < 0.8 else rng.randrange(vocab_size)
            for i in range(rng.randint(0, max(0, most)))
        ]
        return Continuation(tokens, [0.5] * len(tokens))

    lookups.look_up = look_up


def _look_up_on_device_at_random(wide: Any, rng: random.Random, vocab_size: int) -> None:
    """Replace tokens at random, and take a random number of passes, 0 included."""
    import torch

    own, generator = wide._lookups.fill, torch.Generator().manual_seed(rng.randrange(2**31))

    def fill(given: Any, lengths: Any, texts: Any) -> Any:
        is_found = own(given, lengths, texts)
        other = torch.randint(0, vocab_size, given.shape, dtype=torch.int32, generator=generator)
        is_other = torch.rand(given.shape, generator=generator) > 0.8
        is_other &= torch.arange(given.shape[1]) > lengths.unsqueeze(1)
        given.copy_(torch.where(is_other, other, given))
        return is_found

    wide._lookups.fill = fill
    begin_round = wide.begin_round

    def begin_with_any_number(batch: Any, num_steps: int) -> int:
        return rng.randint(0, num_steps) if begin_round(batch, num_steps) else 0

    wide.begin_round = begin_with_any_number


def leave_unlikely_out(worker: Any, min_acceptance: float) -> None:
    """Drop drafts below `min_acceptance` from a fixed number."""
    draft_of(worker)._drafter._staged._min_acceptance = min_acceptance


def cut_drafts(worker: Any, min_acceptance: float, min_gain: float = 0.0) -> None:
    """Draft by a controller's plan with these thresholds."""
    from vllm_magicdec.adaptive.draft_plan import DraftPlan

    staged = draft_of(worker)._drafter._staged
    draft = staged.draft

    def draft_by_plan(batch: Any, num_steps: int, prepare: Any) -> Any:
        return draft(batch, DraftPlan(num_steps, min_acceptance, min_gain), prepare)

    staged.draft = draft_by_plan


def served_answers(worker: Any) -> list[int]:
    served = draft_of(worker)._drafter._staged._lookups._sources["served"]
    return [*served._older.tokens.tolist(), *served._newer.tokens.tolist()]


def break_lookups(worker: Any) -> None:
    def look_up(*args: Any) -> Any:
        raise RuntimeError("broken on purpose")

    draft_of(worker)._drafter._staged._lookups.look_up = look_up


def wait_in_drafts(worker: Any) -> None:
    import torch

    drafter = draft_of(worker)._drafter
    draft = drafter.draft

    def wait_and_draft(*args: Any) -> bool:
        torch.ones(1, device=worker.device).item()
        return draft(*args)

    drafter.draft = wait_and_draft


def forget_failures(worker: Any) -> None:
    from vllm_magicdec.drafting.pauses import Pauses

    drafter = draft_of(worker)._drafter
    drafter._pauses = Pauses("Drafting", "steps go on without useful drafts")
    if drafter._staged is not None:
        drafter._staged._lookup_pauses = Pauses("A lookup", "every draft takes a pass of its own")
    if drafter._wide is not None:
        drafter._wide._pauses = Pauses("A lookup", "every draft takes a pass of its own")


def draft_twice(worker: Any) -> None:
    from collections import Counter

    import torch

    from vllm_magicdec.views.round import Round

    runner = draft_of(worker)
    drafter = runner._drafter
    compared = Counter(drafts=0, rounds=0, different=0, other_logits=0, not_kept=0, passes=0)
    if drafter._staged is not None:
        drafter._staged._min_acceptance = 0.0  # to compare as many drafts as possible
    # None also for greedy drafts.
    read = runner.draft_logits if worker.vllm_config.use_v2_model_runner else None

    def draft_one_by_one(prepared: Any, batch: Any, drafts: torch.Tensor) -> torch.Tensor:
        tokens, one_by_one = batch.tokens, torch.zeros_like(drafts)
        for index in range(drafts.shape[1]):
            tokens = runner.run(prepared.step(index, tokens)).tokens
            one_by_one[:, index] = tokens
        return one_by_one

    def fill_twice(drafts: torch.Tensor, batch: Any, num_steps: int) -> None:
        prepared = Round(
            [
                views.prepare(batch.of_group(group.kv_cache_group), num_steps)
                for group, views in zip(drafter.groups, drafter._views, strict=True)
            ]
        )
        staged = drafter._staged.draft(batch, num_steps, lambda: prepared)
        drafter.draft_lists = staged
        logits = None if read is None else read.clone()
        one_by_one = draft_one_by_one(prepared, batch, drafts)
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
            # The kept logits are those that every token was sampled from, also after the last pass.
            of_drafts = latest[-1].view(*drafts.shape, -1)
            for index, is_prefilling in enumerate(batch.is_prefilling):
                if not is_prefilling:
                    kept = logits[runner.idx_mapping[index], :num_steps]
                    compared.update(not_kept=not torch.equal(kept, of_drafts[index]))
        one_by_one = draft_one_by_one(prepared, batch, drafts)
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

    drafter._draft_round = fill_twice if drafter._wide is None else fill_widely_twice
    drafter.compared = compared


def drafted_twice(worker: Any) -> dict[str, int]:
    return dict(draft_of(worker)._drafter.compared)


def note_inputs(worker: Any) -> None:
    addresses = worker.noted_inputs = set()

    def note(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        given = {name: value for name, value in inputs.items() if value is not None}
        addresses.add(tuple(sorted((name, value.data_ptr()) for name, value in given.items())))

    worker.model_runner.get_model().register_forward_pre_hook(note, with_kwargs=True)


def noted_inputs(worker: Any) -> list[list[tuple[str, int]]]:
    return sorted(worker.noted_inputs)


def note_saves(worker: Any) -> None:
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


def noted_saves(worker: Any) -> tuple[int, list[int]]:
    return len(worker.noted_steps), list(worker.noted_saves.values())


def watch_draft_cache(worker: Any) -> None:
    import numpy as np
    import torch

    from vllm_magicdec.attention.rows import KVRows

    proposer = draft_of(worker)
    cache, layers = proposer._drafting, worker.model_runner.compilation_config.static_forward_context
    seen = worker._draft_cache = {"tokens": 0, "difference": 0.0, "rounds": 0, "catch_up": 0}
    catch_up = cache.catch_up

    def rows_of(name: str) -> Any:
        layer = layers[name]
        isa = getattr(layer.impl, "isa", None) or getattr(layer, "isa", None)
        return KVRows.of(layer.kv_cache, layer.get_attn_backend().get_name(), isa)

    def held_on_v1(batch: Any) -> tuple[Any, list[int]]:
        seen["catch_up"] = max(seen["catch_up"], cache.num_catch_up_tokens)
        pages = worker.model_runner.input_batch.block_table.block_tables[0].block_table.np
        return pages, list(map(cache._held.first_lacking, pages, cache._ends))

    def held_on_v2(batch: Any) -> tuple[Any, list[int]]:
        has_catch_up, lacking = cache._has_catch_up, cache._lacking[cache._rows]
        seen["catch_up"] = max(seen["catch_up"], 0 if has_catch_up is None else int(has_catch_up.sum()))
        seen["lag"] = max(seen.get("lag", 0), int(lacking.max()))
        pages = proposer.block_tables.input_block_tables[0].numpy()
        return pages, (batch.context_lens.numpy() - lacking).clip(min=0).tolist()

    is_v2 = worker.vllm_config.use_v2_model_runner
    names = sorted(cache.layer_names if is_v2 else proposer._draft_attn_layer_names)

    def catch_up_and_compare(batch: Any, num_steps: int) -> None:
        catch_up(batch, num_steps)
        seen["rounds"] += 1
        pages, ends = held_on_v2(batch) if is_v2 else held_on_v1(batch)
        for of_request, end in zip(pages, ends, strict=False):  # vLLM's tables have more rows
            if not end:
                continue
            page, within = np.divmod(np.arange(end), cache._page_size)
            slots = torch.from_numpy(of_request[page].astype(np.int64) * cache._page_size + within)
            for name in names:
                caches = [rows_of(name), rows_of(name.removeprefix("draft_model."))]
                by_head = slots.expand(caches[0].num_kv_heads, -1)
                for part in ("keys", "values"):
                    own, theirs = (getattr(rows, part).gather(by_head) for rows in caches)
                    seen["difference"] = max(seen["difference"], float((own - theirs).abs().max()))
            seen["tokens"] += end

    cache.catch_up = catch_up_and_compare


def read_prompts_late(worker: Any) -> None:
    cache = draft_of(worker)._drafting
    catch_up = cache.catch_up

    def catch_up_late(batch: Any, num_steps: int) -> None:
        if not any(batch.is_prefilling):
            catch_up(batch, num_steps)

    cache.catch_up = catch_up_late


def watched_draft_cache(worker: Any) -> dict[str, float]:
    return worker._draft_cache


def adaptive_costs(worker: Any) -> tuple[float, float]:
    of_drafts, of_verification = worker.model_runner.adaptive_verification.cost_tables
    return float(of_drafts[1]), float(of_verification[1])


def break_drafting(worker: Any, rank: int | None) -> None:
    if rank not in (None, worker.rank):
        return

    def choose_pages(context_lens, last_pages):
        raise RuntimeError("broken on purpose")

    draft_of(worker)._drafter._views[0]._policy.choose_pages = choose_pages


def record_graphs(worker: Any, sizes: list[int]) -> None:
    import recorded_graphs

    recorded_graphs.capture(draft_of(worker), sizes)


def run_passes_as_captured(worker: Any) -> None:
    from types import SimpleNamespace

    from vllm_magicdec.vllm_api.draft_graphs import RoundGraphs

    runner = draft_of(worker)

    def replay(tokens: Any, step: Any, num_adapters: int) -> Any:
        return runner.forward_and_sample_each(tokens, step, runner.step_metadata(step))

    as_captured = SimpleNamespace(replay=replay, graphs={None: None}, max_captured_reqs=4)
    runner._graphs = RoundGraphs(passes=dict.fromkeys(runner.speculative_config.round_lengths, as_captured))


def count_replays(worker: Any) -> dict[int, int]:
    import recorded_graphs

    return recorded_graphs.num_replays(draft_of(worker))


def watch_draft_steps(worker: Any) -> None:
    draft = draft_of(worker)
    draft.steps_seen = {"graph": 0, "flashinfer": 0, "eager": 0}
    forward = draft.forward_and_sample

    def forward_and_count(*args: Any) -> Any:
        draft.steps_seen["eager"] += 1
        return forward(*args)

    draft.forward_and_sample = forward_and_count

    def count_graphs_of(graphs: Any) -> None:
        run_fullgraph = graphs.run_fullgraph

        def run_and_count(desc: Any) -> Any:
            draft.steps_seen["graph"] += 1
            # Graphs for views of a common length exist only with FlashInfer.
            draft.steps_seen["flashinfer"] += desc.common_len is not None
            return run_fullgraph(desc)

        graphs.run_fullgraph = run_and_count

    for graphs in draft._graphs._graphs.values():
        count_graphs_of(graphs)


def count_draft_steps(worker: Any) -> dict[str, int]:
    return draft_of(worker).steps_seen


def believe_in_uniform_drafts(worker: Any) -> None:
    runner = worker.model_runner
    true_probs = runner._get_spec_decode_draft_probs

    def uniform_probs(metadata):
        probs = true_probs(metadata)
        return None if probs is None else probs.new_full(probs.shape, 1 / probs.shape[-1])

    runner._get_spec_decode_draft_probs = uniform_probs


def describe_attention(worker: Any) -> dict[str, Any]:
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


def describe_draft(worker: Any) -> dict[str, Any]:
    draft = draft_of(worker)
    return {
        **describe_attention(worker),
        "class": type(draft).__name__,
        "model_is_target": draft.model is worker.model_runner.get_model(),
    }


def kernel_library(worker: Any) -> str:
    import kernel_libraries

    return kernel_libraries.loaded()
