# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions of a prompt's last tokens on both runners."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_magicdec.vllm_api.rope import positions_on_device, positions_on_host

NUM_DIMS, MODEL_LEN = 3, 40


def test_prompts_have_vllms_positions_and_generated_text_a_constant_delta():
    generator = torch.Generator().manual_seed(3)
    prompt_lens, deltas = [12, 20, 9], [-4, 0, 7]
    known = [torch.randint(0, 30, (NUM_DIMS, n), generator=generator) for n in prompt_lens]
    chosen = [2, 0]  # rows of the state, in the order of the pass
    indices = np.array([[6, 7, 8, 9, 10], [13, 14, 15, 16, 17]])
    expected = [
        [
            int(known[row][dim, index]) if index < prompt_lens[row] else index + deltas[row]
            for row, of_request in zip(chosen, indices.tolist(), strict=True)
            for index in of_request
        ]
        for dim in range(NUM_DIMS)
    ]
    states = ({"mrope_positions": known[row], "mrope_position_delta": deltas[row]} for row in chosen)
    requests = [SimpleNamespace(**state) for state in states]
    assert positions_on_host(requests, indices).tolist() == expected

    of_prompts = torch.full((len(known) * NUM_DIMS, MODEL_LEN), -1, dtype=torch.int32)
    for row, positions in enumerate(known):
        of_prompts[row * NUM_DIMS : (row + 1) * NUM_DIMS, : prompt_lens[row]] = positions
    state = SimpleNamespace(
        num_dims=NUM_DIMS,
        prefill_positions=SimpleNamespace(gpu=of_prompts),
        prefill_delta=SimpleNamespace(gpu=torch.tensor(deltas, dtype=torch.int32)),
    )
    rows = torch.tensor(chosen).unsqueeze(1)
    found = positions_on_device(state, rows, torch.from_numpy(indices), torch.tensor(prompt_lens)[rows])
    assert found.tolist() == expected and found.dtype == torch.int64
