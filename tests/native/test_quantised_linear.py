# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights, in every variant that this machine runs, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import kernel_of, variants

from vllm_magicdec.native import quantised_linear
from vllm_magicdec.native.quantised_linear import multiply, pack

# Activations have 7 bits without AVX512_VNNI if weights have 8.
LARGEST_INTEGER = {4: 127, 8: 63}
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [16 * tiles, 32 * groups] float64 from the documented layout, number by number."""
    num_tiles, num_groups, _ = packed.shape
    weights = torch.zeros(16 * num_tiles, 32 * num_groups, dtype=torch.float64)
    for tile in range(num_tiles):
        for group in range(num_groups):
            block = packed[tile, group]
            scales, minima = block[-64:].view(torch.bfloat16).double().split(16)
            for output in range(16):
                for i in range(32):
                    step, within = divmod(i, 4)
                    if bits == 8:
                        integer = int(block[step * 64 + output * 4 + within])
                    else:
                        pair = int(block[step // 2 * 64 + output * 4 + within])
                        integer = pair >> 4 if step % 2 else pair & 15
                    weights[16 * tile + output, 32 * group + i] = scales[output] * integer + minima[output]
    return weights


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]))
def test_packed_weights_are_near(bits, out_features, in_features, seed, size):
    torch.manual_seed(seed)
    weights = torch.randn(out_features, in_features) * size
    weights[0] = 0.25 * size  # all alike
    unpacked = unpack(pack(weights, bits), bits)[:out_features, :in_features]
    padded = torch.nn.functional.pad(weights, (0, -in_features % 32)).view(out_features, -1, 32)
    spread = padded.amax(2) - padded.amin(2)
    # Half a step, which rounding to bfloat16 makes larger by at most 2^-7 of the largest weight.
    step = (spread + 2**-6 * padded.abs().amax(2)) / (2**bits - 1)
    if bits == 8:
        bound = (0.51 * step).repeat_interleave(32, 1)[:, :in_features]
        assert ((unpacked - weights).abs() <= bound + 1e-30).all()
    else:  # a few weights may be further away if the others are nearer
        squares = torch.nn.functional.pad((unpacked - weights).square(), (0, -in_features % 32))
        assert (squares.view(out_features, -1, 32).sum(2) <= 32 * (0.51 * step).square() + 1e-30).all()


def test_four_bits_minimise_the_error_of_important_inputs():
    torch.manual_seed(0)
    weights, importance = torch.randn(64, 320), torch.randn(320).mul(2).exp()
    importance[7] = 0
    low, high = weights.view(64, -1, 32).aminmax(dim=2, keepdim=True)
    step = (high - low) / 15
    nearest = (((weights.view(64, -1, 32) - low) / step).round() * step + low).view(64, 320)

    def error(rounded: torch.Tensor, factors: torch.Tensor) -> float:
        return ((rounded - weights).square() * factors).sum().item()

    uniform, fitted = unpack(pack(weights, 4), 4), unpack(pack(weights, 4, importance), 4)
    assert error(uniform, torch.ones(320)) < 0.9 * error(nearest, torch.ones(320))
    assert error(fitted, importance) < 0.5 * error(uniform, importance)
    assert torch.equal(unpack(pack(weights, 4, torch.zeros(320)), 4), uniform), "dead inputs"


@variants
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ROUNDING)
@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 19),
    out_features=st.integers(1, 50),
    in_features=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_float64(variant, bits, dtype, num_rows, out_features, in_features, seed):
    kernel = kernel_of(variant)
    torch.manual_seed(seed)
    packed = pack(torch.randn(out_features, in_features), bits)
    weights = unpack(packed, bits)[:out_features, :in_features]
    wide = torch.randn(num_rows, in_features + 3).to(dtype)
    wide[0] *= 100  # a row has its own scales
    inputs = wide[:, :in_features]  # rows need not be contiguous
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_linear, "_kernel", lambda: kernel.multiply)
        output = multiply(inputs, packed, out_features, bits)
    assert output.dtype == dtype and output.shape == (num_rows, out_features)
    expected = inputs.double() @ weights.T
    # Half a step of each activation, times the weights of its group.
    padded = torch.nn.functional.pad(inputs.double().abs(), (0, -in_features % 32)).view(num_rows, -1, 32)
    half_step = (padded.amax(2) / LARGEST_INTEGER[bits] / 2).repeat_interleave(32, 1)[:, :in_features]
    bound = half_step @ weights.abs().T * 1.001 + (ROUNDING[dtype] * 2 + 1e-6) * (
        inputs.double().abs() @ weights.abs().T
    )
    assert ((output.double() - expected).abs() <= bound + 1e-12).all()


def test_compiled_code_calls_the_operator():
    packed = pack(torch.randn(48, 64), 4)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm_magicdec.multiply(inputs, packed, 48, 4) + 1

    inputs = torch.randn(3, 64)
    assert torch.equal(compiled(inputs), multiply(inputs, packed, 48, 4) + 1)
