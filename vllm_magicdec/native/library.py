# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel: which of its variants this machine runs, and a call of it."""

import ctypes
import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_magicdec.machine import has_slow_avx512_bf16

FOLDER = Path(__file__).parent
MAX_QUERY_LEN = 32  # query tokens of a request
BLOCK = 32  # tokens; pages hold a multiple of them
MAX_HEAD_SIZE = 512
_QUERY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FP8_TYPES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
_CACHE_TYPES = {**_QUERY_TYPES, **_FP8_TYPES}
# By the names in vLLM's `layer.isa`.
_LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1}


@dataclass(frozen=True)
class Variant:
    """The kernel for one instruction set."""

    name: str
    description: str
    machine: str  # `platform.machine()`; "": any

    @property
    def file_name(self) -> str:
        """Of the shared library."""
        return f"attention_{self.name}.so"

    @property
    def path(self) -> Path:
        """Where the build puts it."""
        return FOLDER / self.file_name


# The best first, but for `variants_here`; setup.py compiles them.
VARIANTS = (
    Variant("amx", "AMX", "x86_64"),
    Variant("avx512_bf16", "AVX512_BF16", "x86_64"),
    Variant("avx512", "AVX-512", "x86_64"),
    Variant("avx2", "AVX2", "x86_64"),
    Variant("portable", "vectors of 128 bits", ""),
)

# Before the others where `has_slow_avx512_bf16`: for 4 query tokens and more AVX-512 is up to 1.9 times as
# fast.
_FIRST_IF_BFLOAT16_IS_SLOW = ("amx", "avx512", "avx512_bf16")


def runs_here(variant: Variant) -> bool:
    """Whether this machine has the instructions, as torch sees it."""
    if variant.machine not in ("", platform.machine()):
        return False
    if variant.name == "portable":
        return True
    avx512 = torch.cpu._is_avx512_supported()
    if variant.name == "amx":  # which the operating system permits to those who ask
        amx = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported()
        return avx512 and amx and torch.cpu._init_amx()
    return {
        "avx512_bf16": avx512 and torch.cpu._is_avx512_bf16_supported(),
        "avx512": avx512,
        "avx2": torch.cpu._is_avx2_supported(),
    }[variant.name]


def variants_here() -> tuple[Variant, ...]:
    """Those that this machine runs, the fastest first."""
    here = {variant.name: variant for variant in VARIANTS if runs_here(variant)}
    first = _FIRST_IF_BFLOAT16_IS_SLOW if has_slow_avx512_bf16() else ()
    names = dict.fromkeys([*(name for name in first if name in here), *here])
    return tuple(here[name] for name in names)


def best_variant() -> Variant | None:
    """The fastest of those that were built."""
    return next((variant for variant in variants_here() if variant.path.exists()), None)


class Call(ctypes.Structure):
    """`MagicdecCall` of attention.h."""

    _fields_ = [
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("cache_head_stride", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_token_stride", ctypes.c_int64),
        ("output_head_stride", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("context_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slots_request_stride", ctypes.c_int64),
        ("slots_head_stride", ctypes.c_int64),
        ("slot_lens", ctypes.c_void_p),
        ("is_seen", ctypes.c_void_p),
        ("is_seen_request_stride", ctypes.c_int64),
        ("is_seen_token_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("query_type", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
        ("num_reqs", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
    ]


class UnreadableError(ValueError):
    """The kernel does not read such a cache; the message says why."""


_APART = "it reads and writes neighbouring numbers"


def _as_int32(numbers: torch.Tensor) -> torch.Tensor:
    """The kernel reads memory as it is told to: so of this type, and neighbours in the last dimension."""
    # The first question is the quicker one.
    if numbers.dtype == torch.int32 and (numbers.is_contiguous() or numbers.stride(-1) == 1):
        return numbers
    return numbers.to(torch.int32).contiguous()


@functools.cache
def load(variant: Variant) -> "Kernel":
    """The kernel of a variant that was built and runs here; once per process.

    Raises:
        OSError: it cannot be loaded.
    """
    return Kernel(variant)


class Kernel:
    """Attention of a few query tokens per request over vLLM's paged KV cache on CPUs.

    Sums are float32, in whatever order the threads share the work out. Against exact arithmetic on the same
    inputs, a float32 result is off by at most 2e-6 of the largest value that is weighed, by 2e-7 times a
    soft cap more, and by 2e-10 for each token of the context, if no error cancels another. With AVX512_BF16
    a bfloat16 cache's weights are rounded to bfloat16 before they multiply values, and in the layout `amx`
    those of an fp8 cache, too: a result is then off by 2^-8 of the largest value at most, elsewhere by as
    little as in float32; then it is rounded to its own dtype.
    tests/native measures all of it.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        # Its OpenMP is the one that torch brought: one pool of threads for everything.
        library = ctypes.CDLL(str(variant.path))
        try:
            is_current = library.magicdec_call_end() == Call.page_size.offset + Call.page_size.size
            self._attend, self._weigh = library.magicdec_attend, library.magicdec_weigh
        except AttributeError:
            is_current = False
        if not is_current:
            raise OSError(f"{variant.path.name} is of other sources; run 'pip install -e .' once more")
        for function in (self._attend, self._weigh):
            function.argtypes = [ctypes.c_void_p]  # of a `Call`; a pointer's type would be looked up

    def over(self, kv_cache: torch.Tensor, layout: str) -> "CacheAttention":
        """Attention over a KV cache, which is checked and described once.

        Args:
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size] as vLLM's CPU backend keeps it;
                any strides of blocks and heads. Calls read its memory, and nothing here keeps it alive.
            layout: of a page, as vLLM's `layer.isa` names it.

        Raises:
            UnreadableError: with the reason.
        """
        _, _, page_size, content = kv_cache.shape
        self.check_cache(page_size, content // 2, kv_cache.dtype, layout)
        if kv_cache.stride(-1) != 1:
            raise UnreadableError(_APART)
        return CacheAttention(kv_cache, layout, self._attend, self._weigh)

    def check_cache(self, page_size: int, head_size: int, dtype: torch.dtype, layout: str) -> None:
        """Refuse what the kernel was not written for.

        Args:
            page_size: tokens.
            head_size: numbers.
            dtype: of the cache.
            layout: of it, as vLLM's `layer.isa` names it.

        Raises:
            UnreadableError: with the reason.
        """
        is_amx = layout == "amx"
        if layout not in _LAYOUTS:
            raise UnreadableError(
                f"the plugin's own kernel reads caches in the layouts {', '.join(_LAYOUTS)}, not {layout}"
            )
        if is_amx and self.variant.name != "amx":
            raise UnreadableError(
                "the plugin's own kernel for AMX was not built when it was installed, or may not run here"
            )
        if dtype not in _CACHE_TYPES or (is_amx and dtype in _QUERY_TYPES and dtype != torch.bfloat16):
            known = "bfloat16 and fp8" if is_amx else "float32, bfloat16, float16 and fp8"
            raise UnreadableError(f"the plugin's own kernel reads caches of {known}, not {dtype}")
        if page_size % BLOCK:
            raise UnreadableError(
                f"pages of the plugin's own kernel hold a multiple of {BLOCK} tokens, not {page_size}"
            )
        unit = 32 if is_amx else 16
        if head_size % unit or head_size > MAX_HEAD_SIZE:
            raise UnreadableError(
                f"heads of the plugin's own kernel have a multiple of {unit} numbers, {MAX_HEAD_SIZE} at "
                f"most, not {head_size}"
            )


class CacheAttention:
    """A kernel over one KV cache. Calls share its description: each takes microseconds of Python as it is.

    Args:
        kv_cache: see `Kernel.over`.
        layout: see there.
        attend: of the library, as `attention.h` has it.
        weigh: see there.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        layout: str,
        attend: Callable[[Any], int],
        weigh: Callable[[Any], int],
    ) -> None:
        self._attend, self._weigh = attend, weigh
        self._dtype = kv_cache.dtype
        _, num_kv_heads, page_size, content = kv_cache.shape
        self._head_size = content // 2
        if layout == "amx":
            self._query_types = {torch.bfloat16}
        elif kv_cache.dtype in _FP8_TYPES:
            self._query_types = set(_QUERY_TYPES)
        else:
            self._query_types = {kv_cache.dtype}
        self._blank = Call(
            cache=kv_cache.data_ptr(),
            page_stride=kv_cache.stride(0),
            cache_head_stride=kv_cache.stride(1),
            layout=_LAYOUTS[layout],
            cache_type=_CACHE_TYPES[kv_cache.dtype],
            num_kv_heads=num_kv_heads,
            head_size=self._head_size,
            page_size=page_size,
        )

    def attend_pages(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        *,
        query_starts: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        value_scale: float = 1.0,
        soft_cap: float = 0.0,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend to each request's own context, causally.

        Args:
            query: [num_tokens or more, num_heads, head_size], of the cache's dtype, and of any beside an
                fp8 cache; the heads of one KV head are neighbours.
            output: as `query`, or [num_tokens or more, num_heads * head_size]; written.
            query_starts: [num_reqs + 1] int32, where each request's tokens begin, and where the last one's
                end; at most `MAX_QUERY_LEN` of each.
            block_table: [num_reqs, n] int32.
            context_lens: [num_reqs] int32, tokens with the request's query tokens, which are the last.
            scale: of the logits; of an fp8 cache, times its keys'.
            value_scale: of the output: an fp8 cache's values'.
            soft_cap: above 0, logits become `soft_cap * tanh(logits / soft_cap)`.
            window: above 0, a token sees so many, itself included.
            sinks: [num_heads], logits that take part in the softmax's denominator and have no value.

        Raises:
            UnreadableError: the kernel has not this shape.
        """
        query_starts, block_table, context_lens = map(_as_int32, (query_starts, block_table, context_lens))
        call = self._call(query, output, query_starts, scale, value_scale, soft_cap)
        call.block_table, call.context_lens = block_table.data_ptr(), context_lens.data_ptr()
        call.block_table_stride = block_table.stride(0)
        call.window = max(0, window)
        _run(self._attend, call, sinks)

    def attend_slots(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        *,
        query_starts: torch.Tensor,
        slots: torch.Tensor,
        slot_lens: torch.Tensor,
        is_seen: torch.Tensor | None = None,
        scale: float,
        value_scale: float = 1.0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend to chosen tokens of each KV head.

        Args:
            query: this and the arguments that are not below: see `attend_pages`.
            output: see there.
            query_starts: see there.
            slots: [num_reqs, num_kv_heads, width] int32, cache slots.
            slot_lens: [num_reqs] int32, the first so many columns are read.
            is_seen: [num_reqs, most, width] bool, which of them each query token of a request sees, at
                least one; without it, all see all.
            scale: see there.
            value_scale: see there.
            soft_cap: see there.
            sinks: see there.

        Raises:
            UnreadableError: the kernel has not this shape.
        """
        query_starts, slots, slot_lens = map(_as_int32, (query_starts, slots, slot_lens))
        call = self._call(query, output, query_starts, scale, value_scale, soft_cap)
        call.slots, call.slot_lens = slots.data_ptr(), slot_lens.data_ptr()
        call.slots_request_stride, call.slots_head_stride, _ = slots.stride()
        if is_seen is not None:
            is_seen = is_seen.contiguous()
            call.is_seen = is_seen.data_ptr()
            call.is_seen_request_stride, call.is_seen_token_stride, _ = is_seen.stride()
        _run(self._attend, call, sinks)

    def weigh_tokens(
        self,
        query: torch.Tensor,
        *,
        pages: torch.Tensor,
        context_len: int,
        scale: float,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What a request's tokens weigh in the softmax of its last ones, added up over these and heads.

        Args:
            query: [num_tokens, num_heads, head_size], the queries of the last tokens; see `attend_pages`.
            pages: [n] int, the request's.
            context_len: tokens of the request.
            scale: this and the rest: see there.
            soft_cap: see there.
            sinks: see there.

        Returns:
            [num_kv_heads, context_len] float32, of a sum of query tokens times heads of a KV head, less the
            sinks' share.

        Raises:
            UnreadableError: the kernel has not this shape.
        """
        weights = torch.empty((self._blank.num_kv_heads, context_len), dtype=torch.float32)
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        lens = torch.tensor([context_len], dtype=torch.int32)
        table = _as_int32(pages.unsqueeze(0))
        call = self._call(query, query, starts, scale, 1.0, soft_cap)
        call.output, call.output_head_stride = weights.data_ptr(), weights.stride(0)
        call.block_table, call.context_lens = table.data_ptr(), lens.data_ptr()
        _run(self._weigh, call, sinks)
        return weights

    def _call(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        value_scale: float,
        soft_cap: float,
    ) -> Call:
        dtype, strides = query.dtype, output.stride()
        if dtype not in self._query_types or dtype != output.dtype:
            raise UnreadableError(f"queries are {dtype}, its cache is {self._dtype}")
        call = Call.from_buffer_copy(self._blank)
        call.query, call.output = query.data_ptr(), output.data_ptr()
        call.query_token_stride, call.query_head_stride, neighbour = query.stride()
        call.output_token_stride = strides[0]
        call.output_head_stride = strides[1] if len(strides) == 3 else self._head_size
        if not neighbour == strides[-1] == 1:
            raise UnreadableError(_APART)
        _, call.num_heads, head_size = query.shape
        if head_size != self._head_size or output.numel() != query.numel():
            raise UnreadableError(
                f"queries are {list(query.shape)}, the output {list(output.shape)}, and the head size of "
                f"its cache {self._head_size}"
            )
        call.query_type, call.query_starts = _QUERY_TYPES[dtype], query_starts.data_ptr()
        call.num_reqs = query_starts.numel() - 1
        call.scale, call.value_scale, call.soft_cap = scale, value_scale, soft_cap
        return call


def _run(function: Callable[[Any], int], call: Call, sinks: torch.Tensor | None) -> None:
    if sinks is not None:
        sinks = sinks.float().contiguous()
        call.sinks = sinks.data_ptr()
    if function(ctypes.addressof(call)):
        raise UnreadableError(
            f"it takes at most {MAX_QUERY_LEN} query tokens of a request, as many heads for each KV "
            "head, and a scale above 0"
        )
