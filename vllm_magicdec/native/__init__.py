# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs in C++: several query tokens at the price of one read of the KV cache.

| file | what it is |
| --- | --- |
| `attention.h` | what a call is given |
| `attention.cpp` | a request's rows over tiles of tokens; what was cut put together |
| `shares.h` | which blocks are whose, among threads |
| `softmax.h` | products become weights, on line |
| `cache.h` | where a head's tokens are; what the readers of layouts have in common |
| `vector_cache.h`, `product.h` | layouts `vec` and `vec16`: rows in registers times numbers of the cache |
| `amx_cache.h`, `amx_product.h` | layout `amx`: products of AMX's tiles |
| `vectors.h` | vectors as wide as the instruction set; conversions, exponential |
| `library.py` | the same for Python; which variant this machine runs |
| `huge_pages.py` | the KV cache in huge pages, where walks through page tables are what a block waits for |
"""
