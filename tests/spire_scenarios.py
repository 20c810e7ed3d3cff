# SPDX-License-Identifier: Apache-2.0
"""Functions for SPIRe drafts that tests run inside workers: scenarios.py calls them by `collective_rpc`."""

import functools
from typing import Any

import torch
from inside_workers import compare_caches, draft_of
from vllm.model_executor.layers.layernorm import RMSNorm

DRAFT_PREFIX = "draft_model.model.layers."


def watch_spire_cache(worker: Any) -> None:
    """Compare the draft's cache with the target's in every round; its memory is the input of each block."""
    draft = draft_of(worker)
    first, cache, groups = draft.model.fields.aux_layers[0], draft._cache, draft._drafter.groups
    seen = worker.noted = {"tokens": 0, "difference": 0.0}
    pairs = []
    for name in (name for group in groups for name in group.layer_names):
        index, rest = name.removeprefix(DRAFT_PREFIX).split(".", 1)
        pairs.append((name, f"model.layers.{first + int(index)}.{rest}"))
    begin_round = cache.begin_round

    def begin_and_compare(batch: Any) -> None:
        begin_round(batch)
        table = batch.block_tables[groups[0].kv_cache_group]
        compare_caches(worker, seen, pairs, table.numpy(), batch.context_lens.tolist())

    cache.begin_round = begin_and_compare
    if worker.vllm_config.use_v2_model_runner:
        _never_wait(cache)


def _never_wait(cache: Any) -> None:
    """Raise if the host reads a tensor's value while memory is written: on a GPU it would wait."""
    from policies.test_host_sync import no_host_reads

    def write_without_reads(write: Any, *args: Any) -> None:
        with no_host_reads(torch.device("cpu")):
            write(*args)

    cache.write_verified = functools.partial(write_without_reads, cache.write_verified)
    cache.write_drafted = functools.partial(write_without_reads, cache.write_drafted)


def break_memory(worker: Any) -> None:
    def memorise(*args: Any) -> None:
        raise RuntimeError("broken on purpose")

    draft_of(worker).model.memorise = memorise


def write_norms_in_place(worker: Any) -> None:
    """Overwrite the inputs of norms, as vLLM's fused kernels on GPUs may."""

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
    """Record each round's verified tokens, and the draft's tokens and logits after them."""
    proposer = draft_of(worker)
    rounds = worker._spire_rounds = []
    draft, forward = proposer._drafter.draft, proposer.forward
    run = proposer.run
    indices: list[int] = []  # request of each token of the latest forward pass

    def note_pass(draft_pass: Any) -> Any:
        indices[:] = draft_pass.queries.request_indices.tolist()
        return run(draft_pass)

    def note_forward(tokens: torch.Tensor, *others: Any) -> Any:
        hidden_states = forward(tokens, *others)
        logits = proposer.model.compute_logits(hidden_states)
        for index, token, own in zip(indices, tokens.tolist(), logits, strict=True):
            rounds[-1][index]["tokens"].append(token)
            rounds[-1][index]["logits"].append(own.clone())
        return hidden_states

    def note_round(num_steps: int, read_batch: Any, read_histories: Any) -> Any:
        def read_and_note() -> Any:
            batch = read_batch()
            rounds.append([])
            for index, history in enumerate(read_histories(batch)):
                own = {"request": batch.req_ids[index], "verified": history.after(0).tolist()[:-1]}
                own["is_prefilling"] = bool(batch.is_prefilling[index])
                rounds[-1].append({**own, "tokens": [], "logits": []})
            return batch

        return draft(num_steps, read_and_note, read_histories)

    proposer._drafter.draft, proposer.forward = note_round, note_forward
    proposer.run = note_pass


def save_drafts(worker: Any, path: str) -> None:
    requests = [own for round_ in worker._spire_rounds for own in round_ if own["tokens"]]
    torch.save([own for own in requests if not own["is_prefilling"]], path)
