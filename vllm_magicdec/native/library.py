# SPDX-License-Identifier: Apache-2.0
"""Bindings of the attention kernel, and the selection of the kernels' variant for this machine."""

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
BLOCK = 32  # tokens; pages hold a multiple
MAX_HEAD_SIZE = 512
QUERY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FP8_TYPES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
_CACHE_TYPES = {**QUERY_TYPES, **_FP8_TYPES}
# By vLLM's `layer.isa`.
_LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1}


@dataclass(frozen=True)
class Variant:
    """The kernels for one instruction set."""

    name: str
    description: str
    machine: str  # `platform.machine()`; "": any

    @property
    def path(self) -> Path:
        """Path of the shared library."""
        return FOLDER / f"kernels_{self.name}.so"


# In order of preference; setup.py compiles them.
VARIANTS = (
    Variant("amx", "AMX", "x86_64"),
    Variant("avx512_bf16", "AVX512_BF16", "x86_64"),
    Variant("avx512", "AVX-512", "x86_64"),
    Variant("avx2", "AVX2", "x86_64"),
    Variant("portable", "vectors of 128 bits", ""),
)

# Preferred if `has_slow_avx512_bf16`: AVX-512 is up to 1.9 times as fast for 4 or more query tokens.
_FIRST_IF_BFLOAT16_IS_SLOW = ("amx", "avx512", "avx512_bf16")


def runs_here(variant: Variant) -> bool:
    """Whether this machine has the instructions, according to torch."""
    if variant.machine not in ("", platform.machine()):
        return False
    if variant.name == "portable":
        return True
    avx512 = torch.cpu._is_avx512_supported()
    if variant.name == "amx":  # needs permission of the operating system
        amx = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported()
        return avx512 and amx and torch.cpu._init_amx()
    return {
        "avx512_bf16": avx512 and torch.cpu._is_avx512_bf16_supported(),
        "avx512": avx512,
        "avx2": torch.cpu._is_avx2_supported(),
    }[variant.name]


def variants_here() -> tuple[Variant, ...]:
    """Return the variants that this machine runs, the fastest first."""
    here = {variant.name: variant for variant in VARIANTS if runs_here(variant)}
    first = _FIRST_IF_BFLOAT16_IS_SLOW if has_slow_avx512_bf16() else ()
    names = dict.fromkeys([*(name for name in first if name in here), *here])
    return tuple(here[name] for name in names)


def best_variant() -> Variant | None:
    """Return the fastest variant that was built."""
    return next((variant for variant in variants_here() if variant.path.exists()), None)


class Call(ctypes.Structure):
    """`MagicdecCall` in attention.h."""

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
    """The kernel does not support a cache or a call."""


_NOT_CONTIGUOUS = "the plugin's own kernel needs contiguous elements in the last dimension"


def _as_int32(numbers: torch.Tensor) -> torch.Tensor:
    """Convert to int32, contiguous in the last dimension."""
    # `is_contiguous` is faster than `stride`.
    if numbers.dtype == torch.int32 and (numbers.is_contiguous() or numbers.stride(-1) == 1):
        return numbers
    return numbers.to(torch.int32).contiguous()


@functools.cache
def load(variant: Variant) -> "Kernel":
    """Load the kernel of a variant once per process; raise OSError if that fails."""
    return Kernel(variant)


def find_kernel() -> "Kernel":
    """Load the best variant that was built and that this machine supports, or raise UnreadableError."""
    variant = best_variant()
    if variant is None:
        raise UnreadableError(
            "the plugin's own kernel was not built, as there was no C++ compiler (GCC 12 or newer) when "
            "it was installed"
        )
    try:
        return load(variant)
    except OSError as error:
        raise UnreadableError(f"the plugin's own kernel cannot be loaded ({error})") from None


class Kernel:
    """Attention of a few query tokens per request over vLLM's paged KV cache on CPUs.

    Sums are float32, in an order that depends on threads. The error of a float32 result is at most 2e-6 of
    the largest value, plus 2e-7 times a soft cap, plus 2e-10 per token of the context. Weights are rounded
    to bfloat16 with AVX512_BF16 and a bfloat16 cache, and in the layout `amx` also with an fp8 cache: the
    error is then at most 2^-8 of the largest value. tests/native measures these bounds.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        # Shares torch's OpenMP thread pool.
        library = ctypes.CDLL(str(variant.path))
        try:
            is_current = library.magicdec_call_end() == Call.page_size.offset + Call.page_size.size
            self.attend, self.weigh = library.magicdec_attend, library.magicdec_weigh
            self.multiply: Callable[[Any], int] = library.magicdec_multiply  # see quantised_linear.py
        except AttributeError:
            is_current = False
        if not is_current:
            raise OSError(f"{variant.path.name} is outdated; run 'pip install -e .' again")
        for function in (self.attend, self.weigh, library.magicdec_multiply):
            function.argtypes = [ctypes.c_void_p]  # address of a structure; faster than a typed pointer

    def over(self, kv_cache: torch.Tensor, layout: str) -> "CacheAttention":
        """Make attention over a KV cache.

        Args:
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size] of vLLM's CPU backend; any
                strides of blocks and heads. The caller keeps its memory alive.
            layout: layout of a page, as in vLLM's `layer.isa`.

        Raises:
            UnreadableError: the kernel does not support the cache.
        """
        _, _, page_size, content = kv_cache.shape
        self.check_cache(page_size, content // 2, kv_cache.dtype, layout)
        if kv_cache.stride(-1) != 1:
            raise UnreadableError(_NOT_CONTIGUOUS)
        return CacheAttention(self, kv_cache, layout)

    def check_cache(self, page_size: int, head_size: int, dtype: torch.dtype, layout: str) -> None:
        """Raise UnreadableError if the kernel does not support a cache; `layout` is vLLM's `layer.isa`."""
        is_amx = layout == "amx"
        if layout not in _LAYOUTS:
            raise UnreadableError(
                f"the plugin's own kernel reads caches in the layouts {', '.join(_LAYOUTS)}, not {layout}"
            )
        if is_amx and self.variant.name != "amx":
            raise UnreadableError(
                "the plugin's own kernel for AMX was not built at installation, or is not permitted here"
            )
        if dtype not in _CACHE_TYPES or (is_amx and dtype in QUERY_TYPES and dtype != torch.bfloat16):
            known = "bfloat16 and fp8" if is_amx else "float32, bfloat16, float16 and fp8"
            raise UnreadableError(f"the plugin's own kernel reads caches of {known}, not {dtype}")
        if page_size % BLOCK:
            raise UnreadableError(
                f"the plugin's own kernel needs pages of a multiple of {BLOCK} tokens, not {page_size}"
            )
        unit = 32 if is_amx else 16
        if head_size % unit or head_size > MAX_HEAD_SIZE:
            raise UnreadableError(
                f"the plugin's own kernel needs heads of a multiple of {unit} elements up to "
                f"{MAX_HEAD_SIZE}, not {head_size}"
            )


class CacheAttention:
    """A kernel over one KV cache (see `Kernel.over`); calls share its description to save Python time."""

    def __init__(self, kernel: Kernel, kv_cache: torch.Tensor, layout: str) -> None:
        self._attend, self._weigh = kernel.attend, kernel.weigh
        self._dtype = kv_cache.dtype
        _, num_kv_heads, page_size, content = kv_cache.shape
        self._head_size = content // 2
        if layout == "amx":
            self._query_types = {torch.bfloat16}
        elif kv_cache.dtype in _FP8_TYPES:
            self._query_types = set(QUERY_TYPES)
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
            query: [num_tokens or more, num_heads, head_size], of the cache's dtype, or of any for an fp8
                cache; the heads of a KV head are adjacent.
            output: as `query`, or [num_tokens or more, num_heads * head_size]; written.
            query_starts: [num_reqs + 1] int32, cumulative query tokens; at most `MAX_QUERY_LEN` each.
            block_table: [num_reqs, n] int32.
            context_lens: [num_reqs] int32, including the query tokens, which are the last.
            scale: scale of the logits, times that of an fp8 cache's keys.
            value_scale: scale of an fp8 cache's values.
            soft_cap: above 0, logits become `soft_cap * tanh(logits / soft_cap)`.
            window: above 0, tokens that a query sees, including itself.
            sinks: [num_heads], logits that only add to the softmax's denominator.

        Raises:
            UnreadableError: the kernel does not support the shapes or dtypes.
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
        """Attend to selected tokens of each KV head; see `attend_pages` for the other arguments.

        `slots` [num_reqs, num_kv_heads, width] int32 are cache slots, of which the first `slot_lens`
        [num_reqs] int32 columns are read. `is_seen` [num_reqs, max_len, width] bool masks them by query
        token of a request; each sees at least one.
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
        """Return the attention weights of a request's tokens, summed over its last queries and heads.

        `query` is [num_tokens, num_heads, head_size], `pages` [n] int; see `attend_pages` for the other
        arguments. The result is [num_kv_heads, context_len] float32.
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
            raise UnreadableError(f"queries are {dtype}, but the cache is {self._dtype}")
        call = Call.from_buffer_copy(self._blank)
        call.query, call.output = query.data_ptr(), output.data_ptr()
        call.query_token_stride, call.query_head_stride, element_stride = query.stride()
        call.output_token_stride = strides[0]
        call.output_head_stride = strides[1] if len(strides) == 3 else self._head_size
        if not element_stride == strides[-1] == 1:
            raise UnreadableError(_NOT_CONTIGUOUS)
        _, call.num_heads, head_size = query.shape
        if head_size != self._head_size or output.numel() != query.numel():
            raise UnreadableError(
                f"queries are {list(query.shape)}, the output is {list(output.shape)}, but the cache has "
                f"heads of {self._head_size}"
            )
        call.query_type, call.query_starts = QUERY_TYPES[dtype], query_starts.data_ptr()
        call.num_reqs = query_starts.numel() - 1
        call.scale, call.value_scale, call.soft_cap = scale, value_scale, soft_cap
        return call


def _run(function: Callable[[Any], int], call: Call, sinks: torch.Tensor | None) -> None:
    if sinks is not None:
        sinks = sinks.float().contiguous()
        call.sinks = sinks.data_ptr()
    if function(ctypes.addressof(call)):
        raise UnreadableError(
            f"the plugin's own kernel needs at most {MAX_QUERY_LEN} query tokens per request, equally many "
            "heads for each KV head, and a scale above 0"
        )
