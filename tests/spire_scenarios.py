# SPDX-License-Identifier: Apache-2.0
"""What tests see of a SPIRe draft inside a worker; scenarios.py has `collective_rpc` call these."""

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_magicdec.attention.rows import KVRows

DRAFT_PREFIX = "draft_model.model.layers."


def draft_of(worker: Any) -> Any:
    """What vLLM's runner asks for drafts: the V1 runner's, or the V2 runner's."""
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or runner.speculator


def watch_cache(worker: Any) -> None:
    """In every round compare the draft's keys and values of all verified tokens with the target's.

    Of a draft of which each block is the target's, and remembers what enters it: then they are the same.
    """
    draft, layers = draft_of(worker), worker.vllm_config.compilation_config.static_forward_context
    first = draft.model.fields.aux_layers[0]
    names = [name for group in draft.groups for name in group.layer_names]
    seen = worker._spire_cache = {"tokens": 0, "difference": 0.0, "rounds": 0}

    def rows_of(name: str) -> KVRows:
        layer = layers[name]
        return KVRows.of(layer.kv_cache, layer.get_attn_backend().get_name(), getattr(layer, "isa", None))

    def compare(req_tables: np.ndarray, ends: list[int]) -> None:
        size = draft.groups[0].cache.block_size
        for pages, end in zip(req_tables, ends, strict=True):
            places = np.arange(end)
            slots = torch.from_numpy(pages[places // size].astype(np.int64) * size + places % size)
            for name in names:
                index, rest = name.removeprefix(DRAFT_PREFIX).split(".", 1)
                own, theirs = rows_of(name), rows_of(f"model.layers.{first + int(index)}.{rest}")
                by_head = slots.expand(own.num_kv_heads, -1)
                for one, other in ((own.keys, theirs.keys), (own.values, theirs.values)):
                    difference = float((one.gather(by_head) - other.gather(by_head)).abs().max())
                    seen["difference"] = max(seen["difference"], difference)
            seen["tokens"] += end
        seen["rounds"] += 1

    cache = draft._drafting.own_cache
    begin_round = cache.begin_round

    def begin_and_compare(batch: Any) -> None:
        begin_round(batch)
        table = batch.block_tables[draft.groups[0].kv_cache_group]
        compare(table.numpy(), batch.context_lens.tolist())

    cache.begin_round = begin_and_compare
    if worker.vllm_config.use_v2_model_runner:
        _never_wait(cache)


def _never_wait(cache: Any) -> None:
    """From now on it is an error to read a value while memory is written: a GPU's host would wait."""
    from policies.test_host_sync import no_host_reads

    def without_reads(write: Any) -> Any:
        def write_without_reads(*args: Any) -> None:
            with no_host_reads(torch.device("cpu")):
                write(*args)

        return write_without_reads

    cache.write_verified = without_reads(cache.write_verified)
    cache.write_drafted = without_reads(cache.write_drafted)


def watched_cache(worker: Any) -> dict[str, float]:
    """Tokens compared, and the largest difference."""
    return worker._spire_cache


def break_memory(worker: Any) -> None:
    """From now on no memory can be written."""

    def memorise(*args: Any) -> None:
        raise RuntimeError("broken on purpose")

    draft_of(worker).model.memorise = memorise


def write_norms_in_place(worker: Any) -> None:
    """As vLLM's fused kernels of GPUs do, which may write over what they are given."""

    def in_place(norm: Any) -> Any:
        def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is None:
                return norm.forward_native(x)
            normed, summed = norm.forward_native(x, residual)
            return x.copy_(normed), residual.copy_(summed)

        return forward

    runner = worker.model_runner
    for model in (runner.model, draft_of(worker).model):
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module._forward_method = in_place(module)


def note_drafts(worker: Any) -> None:
    """From now on keep, of every round, what was verified and what the draft computed after it."""
    proposer = draft_of(worker)
    rounds = worker._spire_rounds = []
    draft, forward = proposer._drafter.draft, proposer._drafting.forward
    step, take = proposer.draft_step, proposer.draft_pass
    places: list[int] = []

    def note_step(tokens: torch.Tensor, draft_step: Any) -> Any:
        places[:] = range(len(tokens))
        return step(tokens, draft_step)

    def note_pass(tokens: torch.Tensor, draft_pass: Any) -> Any:
        places[:] = draft_pass.queries.request_indices.tolist()
        return take(tokens, draft_pass)

    def note_forward(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        hidden_states = forward(tokens, *others)
        logits = proposer.model.compute_logits(hidden_states)
        for place, token, own in zip(places, tokens.tolist(), logits, strict=True):
            rounds[-1][place]["tokens"].append(token)
            rounds[-1][place]["logits"].append(own.clone())
        return hidden_states

    def note_round(num_reqs: int, num_steps: int, read_batch: Any, read_histories: Any) -> Any:
        def read_and_note() -> Any:
            batch = read_batch()
            histories = [history.after(0).tolist() for history in read_histories(batch)]
            rounds.append(
                [
                    {
                        "request": req_id,
                        "verified": history[:-1],
                        "is_prefilling": bool(is_prefilling),
                        "tokens": [],
                        "logits": [],
                    }
                    for req_id, history, is_prefilling in zip(
                        batch.req_ids, histories, batch.is_prefilling, strict=True
                    )
                ]
            )
            return batch

        return draft(num_reqs, num_steps, read_and_note, read_histories)

    proposer._drafter.draft, proposer._drafting.forward = note_round, note_forward
    proposer.draft_step, proposer.draft_pass = note_step, note_pass


def save_drafts(worker: Any, path: str) -> None:
    """What was noted, of requests that have drafted."""
    made = [own for of_round in worker._spire_rounds for own in of_round if own["tokens"]]
    torch.save([own for own in made if not own["is_prefilling"]], path)
