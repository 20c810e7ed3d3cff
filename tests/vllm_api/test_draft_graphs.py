# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft steps; tests/engine/ replays them in real engines."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode

from vllm_magicdec.attention.metadata import DraftMetadata, TokenMetadata
from vllm_magicdec.errors import METHOD
from vllm_magicdec.plugin import register
from vllm_magicdec.views.round import LayerPageView, PageView, Part, Pass, Queries, TokenView
from vllm_magicdec.vllm_api import page_metadata
from vllm_magicdec.vllm_api.draft_graphs import DraftGraphs, dummy_step
from vllm_magicdec.vllm_api.page_metadata import PageMetadata

register()


class Group:
    def __init__(self, name: str, updates_in_graphs: bool) -> None:
        self.layer_names = [name]
        self.supports_draft_decode_metadata_update = updates_in_graphs
        self.kernel_block_size: int | None = None
        self.updated: list[dict] = []

    def update_draft_decode_metadata(self, attn_metadata):
        self.updated.append(attn_metadata)


def test_graphs_update_the_metadata_of_backends_that_support_it():
    names = ("pages", "of_layers", "tokens", "eager", "split")
    pages, of_layers, tokens, eager, split = (Group(name, name != "eager") for name in names)
    split.kernel_block_size = 8
    views = [PageView, LayerPageView, TokenView, PageView, PageView]
    metadata = PageMetadata.__new__(PageMetadata)
    metadata._attention_groups = [[[], [group]] for group in (pages, of_layers, tokens, eager, split)]
    token_metadata = TokenMetadata(torch.zeros(1, 1, 1), torch.zeros(1), None)
    attn_metadata = {"pages": 1, "of_layers": DraftMetadata(2), "eager": 3, "split": 4}
    attn_metadata["tokens"] = token_metadata
    metadata.record_refresh(attn_metadata)
    assert pages.updated == [{"pages": 1}] and of_layers.updated == [{"of_layers": 2}]
    assert not tokens.updated and not eager.updated and not split.updated
    rebuilt: list[int] = []
    metadata._of_part = lambda index, part, queries, view: rebuilt.append(index)
    parts = [SimpleNamespace(view=Mock(spec=view)) for view in views]
    metadata.refresh(SimpleNamespace(parts=parts, queries=None))
    assert rebuilt == [3, 4]


@pytest.fixture
def make_graphs(capture):
    def make(config, num_queries: int = 1, num_sampled: int = 1) -> list[tuple[int, int]]:
        """Requests and tokens of each graph."""
        drafter = SimpleNamespace(groups=[None], common_lens=(None,))
        used = (drafter, None, None, None, None)
        graphs = DraftGraphs(
            config, torch.device("cpu"), CUDAGraphMode.FULL, *used, num_queries, num_sampled
        )
        descs = graphs._capture_descs.get(CUDAGraphMode.FULL, [])
        return sorted((desc.num_reqs, desc.num_tokens) for desc in descs)

    return make


@pytest.mark.parametrize(
    ("engine", "largest"),
    [
        # Passes are at most 256 tokens.
        ({"max_num_seqs": 512}, {(1, 1): 512, (2, 1): 256, (4, 4): 64}),
        ({"max_num_seqs": 100, "max_cudagraph_capture_size": 96}, {(1, 1): 96, (2, 1): 48, (4, 4): 24}),
    ],
)
def test_no_graph_has_more_tokens_than_vllms_largest(configure, make_graphs, engine, largest):
    """FlashAttention 3 and FlashInfer prepare for graphs up to that size."""
    config = configure({"method": METHOD, "num_speculative_tokens": 4}, **engine)
    most = config.compilation_config.max_cudagraph_capture_size
    assert most == engine.get("max_cudagraph_capture_size", 512)
    for (num_queries, num_sampled), num_reqs in largest.items():
        made = make_graphs(config, num_queries, num_sampled)
        assert made[-1] == (num_reqs, num_reqs * num_queries) and made[-1][1] <= most


@pytest.mark.parametrize(
    ("max_num_seqs", "most_graphs"), [(1, 1), (8, 4), (100, 14), (256, 18), (512, 22), (1024, 22)]
)
@pytest.mark.parametrize("num_drafts", [4, 7, "auto"])
def test_few_graphs_pad_batches_little(configure, make_graphs, max_num_seqs, most_graphs, num_drafts):
    """vLLM has 50 to 60 sizes for verifications, and capturing each takes a fraction of a second."""
    config = configure({"method": METHOD, "num_speculative_tokens": num_drafts}, max_num_seqs=max_num_seqs)
    sizes = [num_reqs for num_reqs, _ in make_graphs(config)]
    assert len(sizes) <= most_graphs and sizes[-1] == min(max_num_seqs, 512)
    for num_reqs in range(1, sizes[-1] + 1):
        padded = min(size for size in sizes if size >= num_reqs)
        assert padded <= max(1.25 * num_reqs, min(num_reqs + 7, 2 * num_reqs - 1))


def test_starts_of_uneven_passes_are_on_the_device(monkeypatch):
    """What tells prompts from drafts is on the host; "meta" stands for the device."""
    built = []
    monkeypatch.setattr(page_metadata, "build_attn_metadata", lambda **args: built.append(args) or {})
    groups = [SimpleNamespace(kv_cache_group=0, layer_names=[])]
    metadata = PageMetadata(None, [[]], [[]], groups, 3, torch.device("meta"), [1])
    one, two = (torch.zeros(n, dtype=torch.int64, device="meta") for n in (1, 3))
    view = PageView(torch.zeros(2, device="meta"), torch.zeros(2, 1, device="meta"), 8)
    queries = Queries(np.arange(2), np.array([-2, -1]), np.array([2, 1]))
    metadata.of_pass(Pass(two, queries, [Part(two, two, view)]))
    metadata.of_pass(Pass(one, Queries.uniform(2, 0), [Part(one, one, view)]))
    assert [args["query_start_loc_gpu"].device.type for args in built] == ["meta", "meta"]


class SmallTensors(TorchDispatchMode):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_allocated = isinstance(result, torch.Tensor) and not func._schema.returns[0].alias_info
        assert not is_allocated or result.nbytes <= self._max_bytes, f"{func}: {result.nbytes} bytes"
        return result


def test_dummy_steps_allocate_no_more_than_one_layer_of_a_view():
    """Views of all layers may take gigabytes, of which vLLM would leave nothing for the KV cache."""
    num_layers, num_reqs, num_blocks, page_size, width = 16, 6, 3, 4, 40
    slots = torch.full((num_layers, 8, 2, width), -1, dtype=torch.int32)
    tables = torch.full((num_layers, 8, 2 * width), -1, dtype=torch.int32)
    views = [
        lambda lens: TokenView(lens, slots[:, :num_reqs], None),
        lambda lens: LayerPageView(lens, tables[:, :num_reqs], 8 * width),
        lambda lens: PageView(lens, tables[0, :num_reqs], 8 * width),
    ]
    group = SimpleNamespace(cache=SimpleNamespace(block_size=page_size))
    drafter = SimpleNamespace(
        groups=[group] * len(views),
        common_lens=(None, width),
        capture_view=lambda index, num_reqs, lens, common_len: views[index](lens),
    )
    with SmallTensors(slots[0].nbytes):
        made = dummy_step(drafter, num_reqs, num_blocks, torch.device("cpu"))
    of_tokens, of_layers, of_pages = (part.view for part in made.parts)
    assert of_tokens.common_len == width and of_tokens.lens.tolist() == [width] * num_reqs
    assert of_layers.lens.tolist() == of_pages.lens.tolist() == [8 * width] * num_reqs
    for own in slots[:, :num_reqs]:
        assert set(own.flatten().tolist()) == set(range(num_blocks * page_size))
    for own in tables[:, :num_reqs]:
        assert set(own.flatten().tolist()) == set(range(num_blocks))
    assert (slots[:, num_reqs:] == -1).all() and (tables[:, num_reqs:] == -1).all()
