# SPDX-License-Identifier: Apache-2.0
"""Attention on CPUs in C++: several query tokens at the price of one read of the KV cache.

| file | what it is |
| --- | --- |
| `vectors.h` | vectors as wide as the instruction set; conversions, exponential |
| `product.h` | rows in registers times numbers of the cache, the one product of it all |
| `attention.cpp` | tiles, softmax on line, threads |
| `attention.h` | what a call is given |
| `library.py` | the same for Python; which variant this machine runs |
"""
