# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs in C++: several query tokens at the price of one read of the KV cache.

| file | what it is |
| --- | --- |
| `vectors.h` | vectors as wide as the instruction set; conversions, exponential |
| `product.h` | rows in registers times numbers of the cache, the one product of it all |
| `shares.h` | which blocks are whose, among threads |
| `attention.cpp` | tiles, softmax on line, what was cut put together |
| `attention.h` | what a call is given |
| `library.py` | the same for Python; which variant this machine runs |
"""
