import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ticket_engine import kernels

FORMATS = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 0.01}  # relative to the largest; bfloat16 has 8 bits


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tensor(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - expected).abs().max().item()
    assert error <= CLOSE[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", FORMATS)
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), width=st.integers(1, 200), seed=st.integers(0, 99))
def test_norm_is_that_of_the_formula_in_float64(dtype, rows, width, seed):
    hidden, weight = random_tensor(seed, dtype, rows, width), random_tensor(seed + 1, dtype, width)
    wide = hidden.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(kernels.rms_norm(hidden, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 300), seed=st.integers(0, 99), scale=st.sampled_from([0.1, 5.0, 100.0]))
def test_gated_silu_is_that_of_the_formula_in_float64(dtype, count, seed, scale):
    gate, up = random_tensor(seed, dtype, count, scale=scale), random_tensor(seed + 1, dtype, count)
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert_close(kernels.gated_silu_(gate.clone(), up), expected, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 40), before=st.integers(0, 60), seed=st.integers(0, 99), scale=st.sampled_from([0.125, 3.0]))
def test_causal_weights_are_a_softmax_over_the_keys_that_a_row_sees(dtype, rows, before, seed, scale):
    scores = random_tensor(seed, dtype, 3, rows, before + rows, scale=4)
    hidden = torch.ones(rows, before + rows, dtype=torch.bool).triu_(before + 1)
    expected = torch.softmax((scores.double() * scale).masked_fill(hidden, -torch.inf), -1)
    weights = scores.clone()
    inverse = kernels.causal_weights_(weights, scale)
    assert_close(weights.double() * inverse.double()[..., None], expected, dtype)
    assert (weights[:, hidden] == 0).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_mixed_values_go_to_their_rows_and_to_no_other(dtype):
    mixed, inverse = random_tensor(0, dtype, 2, 3, 4, 5), torch.rand(2, 3, 4)
    output = torch.zeros(2, 9, 3, 5, dtype=dtype)
    kernels.place_scaled(mixed, inverse, output, 2)
    expected = (mixed.double() * inverse.double()[..., None]).permute(0, 2, 1, 3)
    assert_close(output[:, 2:6], expected, dtype)
    assert (output[:, :2] == 0).all()
    assert (output[:, 6:] == 0).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(dtype, bad):
    one = torch.ones(8, dtype=dtype)
    gate, row = one.clone(), one.clone()
    gate[3] = row[3] = bad
    assert not torch.isfinite(kernels.gated_silu_(gate, one)[3])
    assert torch.isnan(kernels.rms_norm(row[None], one, 1e-5)[0, 3])
    scores = one.reshape(1, 2, 4).clone()
    scores[0, 0, 1] = bad
    inverse = kernels.causal_weights_(scores, 1.0)
    assert torch.isnan(scores[0, 0].float() * inverse[0, 0]).any()
    assert torch.isfinite(scores[0, 1].float() * inverse[0, 1]).all()


@pytest.mark.parametrize("value", [1.0, 1.00390625, 1.01171875, 3.3e38, -7.0, 1e-40])
def test_bfloat16_is_rounded_as_torch_rounds_it(value):
    number = torch.tensor([[value]])
    stored = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    kernels.place_scaled(torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), number[None], stored, 0)
    assert stored.item() == number.to(torch.bfloat16).item()


def test_kernels_are_for_passes_of_one_thread_in_formats_that_they_read():
    assert kernels.available(torch.bfloat16)
    assert not kernels.available(torch.float16)
    torch.set_num_threads(2)
    assert not kernels.available(torch.bfloat16)


def test_largest_score_may_stand_anywhere_and_be_negative():
    scores = torch.tensor(np.array([[[-5.0, -3.0, -4.0]]]), dtype=torch.float32)
    inverse = kernels.causal_weights_(scores, 1.0)
    assert scores.max() == 1.0
    assert inverse.item() == pytest.approx(1 / (1 + np.exp(-2) + np.exp(-1)), rel=1e-6)
