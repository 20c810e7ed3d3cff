// SPDX-License-Identifier: Apache-2.0
// What each thread is given of a batch: read from the input, written line by line as thread, request, KV head, its
// first block and the first one that is not its own.

#include "shares.h"

#include <iostream>

int main() {
  int threads, num_kv_heads, reading, num_reqs;
  while (std::cin >> threads >> num_kv_heads >> reading >> num_reqs) {
    magicdec::Shares shares(num_kv_heads, reading);
    for (int request = 0; request < num_reqs; ++request) {
      magicdec::Range blocks;
      int rows;
      std::cin >> blocks.first >> blocks.last >> rows;
      shares.add(blocks, rows);
    }
    shares.divide(threads);
    for (int thread = 0; thread < shares.threads(); ++thread) {
      const auto attend = [&](const magicdec::Part& part) {
        std::cout << thread << ' ' << part.request << ' ' << part.head << ' ' << part.blocks.first << ' '
                  << part.blocks.last << '\n';
      };
      shares.take(thread, attend, [](int) {});
    }
    std::cout << "end " << shares.threads() << '\n';
  }
}
