# SPDX-License-Identifier: Apache-2.0
"""Attention and quantised linear layers on CPUs in C++.

| file | content |
| --- | --- |
| `attention.h`, `attention.cpp` | arguments of a call; attention of a request's rows over tiles of tokens |
| `shares.h` | partition of blocks among threads |
| `softmax.h` | online softmax |
| `cache.h` | addresses of a head's tokens; code shared by the readers of layouts |
| `vector_cache.h`, `product.h` | layouts `vec` and `vec16`: products in vector registers |
| `amx_cache.h`, `amx_product.h` | layout `amx`: products of AMX tiles |
| `quantised_linear.h`, `quantised_linear.cpp` | products with weights of 4 or 8 bits |
| `quantised_linear.py` | packing of weights; the operator |
| `vectors.h` | vectors of the instruction set's width; conversions, exponential |
| `library.py` | Python bindings; selection of the variant for this machine |
| `huge_pages.py` | the KV cache in huge pages, against page-table walks |
"""
