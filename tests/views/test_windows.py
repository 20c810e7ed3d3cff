# SPDX-License-Identifier: Apache-2.0
"""Views of layers that do not see the whole context, against a slow reading of what each query sees."""

import torch
from batches import make_batch, make_slots, steps_of_view
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.views.pages import PageViews
from vllm_magicdec.views.tensors import PAD_SLOT
from vllm_magicdec.views.windows import LocalChunk, ReachedPages, SlidingWindow


@st.composite
def rounds(draw):
    page_size = draw(st.sampled_from([1, 4, 16, 32]))
    model_len = draw(st.integers(1, 300))
    case = dict(
        page_size=page_size,
        model_len=model_len,
        reach=draw(st.sampled_from([SlidingWindow, LocalChunk]))(draw(st.integers(1, 320))),
        max_tokens=draw(st.integers(1, 320)),
        max_num_steps=draw(st.integers(1, 9)),
    )
    case["num_steps"] = draw(st.integers(1, case["max_num_steps"]))
    return case, draw(st.lists(st.integers(0, model_len - 1), min_size=1, max_size=3))


def first_seen(reach, position: int) -> int:
    if isinstance(reach, SlidingWindow):
        return max(0, position + 1 - reach.tokens)
    return position - position % reach.tokens


@settings(max_examples=500, deadline=None)
@given(rounds())
def test_a_view_has_the_reached_pages_and_no_freed_one(drawn):
    case, context_lens = drawn
    names = ("page_size", "model_len", "reach", "max_tokens", "num_steps")
    page, model_len, reach, max_tokens, num_steps = (case[name] for name in names)
    num_reqs, num_blocks = len(context_lens), -(-model_len // page)
    blocks = torch.randperm(num_reqs * num_blocks, generator=torch.Generator().manual_seed(7)) + 1
    table = blocks.view(num_reqs, num_blocks).to(torch.int32)
    for row, context_len in zip(table, context_lens, strict=True):
        # vLLM has freed these: the first query of the round does not see them.
        row[: first_seen(reach, context_len) // page] = -1
    slots = make_slots(page, num_reqs + 1, case["max_num_steps"], model_len)
    views = PageViews(ReachedPages(reach, max_tokens, slots), slots)
    batch = make_batch([str(i) for i in range(num_reqs)], table, context_lens)
    steps = steps_of_view(views.prepare(batch, num_steps), num_steps)
    for step_index, step in enumerate(steps):
        for req, context_len in enumerate(context_lens):
            unclamped = context_len + step_index
            position = min(unclamped, model_len - 1)
            assert int(step.positions[req]) == position
            own = table[req].tolist()
            slot = own[position // page] * page + position % page
            assert int(step.slots[req]) == (slot if unclamped == position else PAD_SLOT)
            length = int(step.view.lens[req])
            view = step.view.block_table[req].tolist()
            assert 1 <= length <= step.view.max_len
            assert min(view[: -(-length // page)]) > 0, "a page that may be gone"
            entries = [view[i // page] * page + i % page for i in range(length)]
            context = [own[p // page] * page + p % page for p in range(position + 1)]
            assert entries == context[-length:]
            first = first_seen(reach, context_len)
            if length <= position - first:  # whole pages: a little more than the budget, never less
                last = min(context_len + num_steps, model_len) - 1
                assert length + last - position > max_tokens - page
            elif isinstance(reach, SlidingWindow):  # what vLLM masks of it is before the window
                assert length >= position + 1 - first_seen(reach, position)
