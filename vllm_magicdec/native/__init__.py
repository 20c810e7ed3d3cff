# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs in C++: several query tokens for one read of the KV cache.

| file | content |
| --- | --- |
| `attention.h`, `attention.cpp` | arguments of a call; attention of a request's rows over tiles of tokens |
| `shares.h` | partition of blocks among threads |
| `softmax.h` | online softmax |
| `cache.h` | addresses of a head's tokens; code shared by the readers of layouts |
| `vector_cache.h`, `product.h` | layouts `vec` and `vec16`: products in vector registers |
| `amx_cache.h`, `amx_product.h` | layout `amx`: products of AMX tiles |
| `vectors.h` | vectors of the instruction set's width; conversions, exponential |
| `library.py` | Python bindings; selection of the variant for this machine |
| `huge_pages.py` | the KV cache in huge pages, against page-table walks |
"""
