# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run inside workers: scenarios.py calls them by `collective_rpc`."""

import functools
import random
from typing import Any


def draft_of(worker: Any) -> Any:
    """Return the drafter of the V1 runner or the speculator of the V2 runner."""
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or runner.speculator


def noted(worker: Any) -> Any:
    return worker.noted


def measured_inputs(worker: Any) -> dict[str, list[float]]:
    """Return the mean squares of the target's inputs that 4 bits are fitted to, by layer."""
    copy = draft_of(worker)._copy
    names = {module: name for name, module in copy._target.named_modules()}
    return {names[layer]: squares.tolist() for layer, squares in copy._importance().items()}


def latest_selection(worker: Any) -> dict[str, Any]:
    selections = draft_of(worker)._drafter._views[0]._selections
    row = selections.rows([list(selections._selected_at)[-1]])
    count = int(selections.counts[row])
    return {
        "end": int(selections.ends[row]),
        "positions": selections.positions[row][0, ..., :count].tolist(),
    }


def look_up_at_random(worker: Any, seed: int) -> None:
    from vllm_magicdec.drafting.wide_passes import WidePasses
    from vllm_magicdec.lookup.continuation import Continuation

    loop, rng = draft_of(worker)._drafter._loop, random.Random(seed)
    if isinstance(loop, WidePasses):
        _look_up_on_device_at_random(loop, rng, worker.model_config.get_vocab_size())
        return
    loop._min_acceptance = 0.0  # random lookups contradict all drafts
    lookups = loop._lookups
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
    draft_of(worker)._drafter._loop._min_acceptance = min_acceptance


def cut_drafts(worker: Any, min_acceptance: float, min_gain: float = 0.0) -> None:
    """Draft by a controller's plan with these thresholds."""
    from vllm_magicdec.adaptive.draft_plan import DraftPlan

    staged = draft_of(worker)._drafter._loop
    draft = staged.draft

    def draft_by_plan(batch: Any, num_steps: int, prepare: Any) -> Any:
        return draft(batch, DraftPlan(num_steps, min_acceptance, min_gain), prepare)

    staged.draft = draft_by_plan


def served_answers(worker: Any) -> list[int]:
    served = draft_of(worker)._drafter._loop._lookups._sources["served"]
    return [*served._older.tokens.tolist(), *served._newer.tokens.tolist()]


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
    for name in ("_lookup_pauses", "_pauses"):
        if hasattr(drafter._loop, name):
            setattr(drafter._loop, name, Pauses("A lookup", "every draft takes a pass of its own"))


def draft_twice(worker: Any) -> None:
    """Draft every round by wide passes and by one pass per token; count what differs."""
    from collections import Counter

    import torch

    runner = draft_of(worker)
    loop = runner._drafter._loop
    compared = worker.noted = Counter(rounds=0, different=0, other_logits=0, not_kept=0, passes=0)
    read = runner.draft_logits  # None for greedy drafts
    latest: list[torch.Tensor] = []
    if read is not None:
        compute = runner.compute_draft_logits

        def compute_and_note(*args: Any) -> torch.Tensor:
            latest[:] = [compute(*args)]
            return latest[0]

        runner.compute_draft_logits = compute_and_note

    draft_once = functools.partial(type(loop).draft, loop)  # not an earlier call's replacement

    def draft(batch: Any, num_steps: int, prepare: Any) -> Any:
        """Draft by the loop, and then by steps over the same views, whose drafts are dropped."""
        rounds: list[Any] = []

        def prepare_once(*, is_wide: bool = False) -> Any:
            rounds.append(prepare(is_wide=is_wide))
            return rounds[0]

        drafts = draft_once(batch, num_steps, prepare_once)
        if drafts.num_passes == num_steps:  # the drafts of steps
            return drafts
        made = drafts.tokens.clone()
        logits = None if read is None else read.clone()
        if logits is not None:
            # The kept logits are those that every token was sampled from, also after the last pass.
            of_drafts = latest[-1].view(*made.shape, -1)
            for index, is_prefilling in enumerate(batch.is_prefilling):
                if not is_prefilling:
                    kept = logits[runner.idx_mapping[index], :num_steps]
                    compared.update(not_kept=not torch.equal(kept, of_drafts[index]))
        tokens, one_by_one, round_ = batch.tokens, [], rounds[0] if rounds else prepare()
        for index in range(num_steps):
            tokens = runner.run(round_.step(index, tokens)).tokens
            one_by_one.append(tokens.tolist())
        used = drafts.num_passes
        for index, own in enumerate(zip(*one_by_one, strict=True)):
            if batch.is_prefilling[index]:
                continue
            same = made[index][:used].tolist() == list(own[:used])
            compared.update(rounds=1, different=not same, passes=used)
            if logits is not None and same:
                row = runner.idx_mapping[index]
                both = logits[row, :used], read[row, :used]
                compared.update(other_logits=not torch.allclose(*both, rtol=1e-4, atol=1e-4))
        drafts.tokens.copy_(made)
        if logits is not None:
            read.copy_(logits)
        return drafts

    loop.draft = draft


def note_inputs(worker: Any) -> None:
    noted = worker.noted = {"inputs": []}  # of forward passes of the target, by name

    def note(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        names = sorted(name for name, value in inputs.items() if value is not None)
        if names not in noted["inputs"]:
            noted["inputs"].append(names)

    worker.model_runner.get_model().register_forward_pre_hook(note, with_kwargs=True)


def note_saves(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    counted = worker.noted = {"steps": 0, "saves": {}}  # that a KV connector saw, and of each layer
    bind, save = connector.bind_connector_metadata, connector.save_kv_layer

    def bind_and_note(metadata: Any) -> None:
        counted["steps"] += 1
        bind(metadata)

    def save_and_note(layer_name: str, *args: Any, **kwargs: Any) -> None:
        counted["saves"][layer_name] = counted["saves"].get(layer_name, 0) + 1
        save(layer_name, *args, **kwargs)

    connector.bind_connector_metadata, connector.save_kv_layer = bind_and_note, save_and_note


def watch_draft_cache(worker: Any) -> None:
    """Compare the cache of a draft model, the target itself, with the target's in every round."""
    proposer = draft_of(worker)
    cache, is_v2 = proposer._cache, worker.vllm_config.use_v2_model_runner
    seen = worker.noted = {"tokens": 0, "difference": 0.0, "catch_up": 0, "lag": 0}
    catch_up = cache.catch_up
    names = sorted(proposer.draft_attn_layer_names if is_v2 else proposer._draft_attn_layer_names)
    pairs = [(name, name.removeprefix("draft_model.")) for name in names]

    def catch_up_and_compare(batch: Any, num_steps: int, **options: Any) -> None:
        catch_up(batch, num_steps, **options)
        waiting, lacking = cache._waiting, cache._lacking[cache._rows]
        seen["catch_up"] = max(seen["catch_up"], 0 if waiting is None else int(waiting.sum()))
        seen["lag"] = max(seen["lag"], int(lacking.max()))
        ends = (batch.context_lens.numpy() - lacking).clip(min=0).tolist()
        compare_caches(worker, seen, pairs, batch.block_tables[0].numpy(), ends)

    cache.catch_up = catch_up_and_compare


def compare_caches(worker: Any, seen: dict[str, Any], pairs: Any, tables: Any, ends: list[int]) -> None:
    """Compare the first `ends` tokens of requests in `pairs` of a draft's and the target's layers."""
    import numpy as np
    import torch

    from vllm_magicdec.attention.rows import KVRows

    layers = worker.vllm_config.compilation_config.static_forward_context

    def rows_of(name: str) -> Any:
        layer = layers[name]
        isa = getattr(layer.impl, "isa", None) or getattr(layer, "isa", None)
        return KVRows.of(layer.kv_cache, layer.get_attn_backend().get_name(), isa)

    size = worker.vllm_config.cache_config.block_size
    for table, end in zip(tables, ends, strict=True):
        page, within = np.divmod(np.arange(end), size)
        slots = torch.from_numpy(table[page].astype(np.int64) * size + within)
        for both in (map(rows_of, pair) for pair in pairs if end):
            own, theirs = both
            by_head = slots.expand(own.num_kv_heads, -1)
            for part in ("keys", "values"):
                one, other = (getattr(rows, part).gather(by_head) for rows in (own, theirs))
                seen["difference"] = max(seen["difference"], float((one - other).abs().max()))
        seen["tokens"] += end


def read_prompts_late(worker: Any) -> None:
    cache = draft_of(worker)._cache
    catch_up = cache.catch_up

    def catch_up_late(batch: Any, num_steps: int, **options: Any) -> None:
        if not any(batch.is_prefilling):
            catch_up(batch, num_steps, **options)

    cache.catch_up = catch_up_late


def adaptive_costs(worker: Any) -> tuple[float, float]:
    of_drafts, of_verification = worker.model_runner.adaptive_verification.cost_tables
    return float(of_drafts[1]), float(of_verification[1])


def record_graphs(worker: Any, sizes: list[int]) -> None:
    import recorded_graphs

    recorded_graphs.capture(draft_of(worker), sizes)


def run_passes_as_captured(worker: Any) -> None:
    from types import SimpleNamespace

    runner = draft_of(worker)

    def replay(draft_pass: Any, num_adapters: int) -> Any:
        return runner.forward_and_sample(draft_pass, runner.page_metadata.of_pass(draft_pass))

    as_captured = SimpleNamespace(replay=replay, graphs={None: None}, max_captured_reqs=4)
    kinds = [(length, length) for length in runner.speculative_config.round_lengths if length > 1]
    runner._graphs = dict.fromkeys(kinds, as_captured)


def count_replays(worker: Any) -> dict[int, int]:
    import recorded_graphs

    return recorded_graphs.num_replays(draft_of(worker))


def watch_draft_steps(worker: Any) -> None:
    draft = draft_of(worker)
    seen = worker.noted = {"graph": 0, "flashinfer": 0, "eager": 0}
    forward = draft.forward_and_sample

    def forward_and_count(*args: Any) -> Any:
        seen["eager"] += 1
        return forward(*args)

    draft.forward_and_sample = forward_and_count

    for graphs in draft._graphs.values():

        def run_and_count(desc: Any, run_fullgraph: Any = graphs.run_fullgraph) -> Any:
            seen["graph"] += 1
            # Graphs for views of a common length exist only with FlashInfer.
            seen["flashinfer"] += desc.common_len is not None
            return run_fullgraph(desc)

        graphs.run_fullgraph = run_and_count


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
    caches = (getattr(layer, "kv_cache", None) for layer in context.values())
    on_cpu = [one for one in caches if isinstance(one, torch.Tensor) and one.is_cpu and one.numel()]
    impls = [layer.impl for layer in context.values() if hasattr(layer, "impl")]
    return {
        "in_huge_pages": huge_memory.share_in_huge_pages(on_cpu[0]) if on_cpu else 0.0,
        "native_layers": sum(native_of(impl) is not None for impl in impls),
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
