import pytest
import torch
from torch import nn

from ticket_engine.products import OneDnnLinear, has_onednn, is_onednn_faster

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this build of PyTorch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_layer_answers_like_the_layer_whose_weights_it_shares(bias, dtype):
    torch.manual_seed(0)
    stock = nn.Linear(48, 30, bias=bias).to(dtype)
    rows = torch.randn(1, 7, 48).to(dtype)
    with torch.inference_mode():
        got, expected = OneDnnLinear(stock)(rows), stock(rows)
    assert got.shape == expected.shape
    assert torch.allclose(got.float(), expected.float(), atol=1e-6 if dtype == torch.float32 else 0.02)


def test_onednn_layer_holds_no_copy_of_the_weights():
    stock = nn.Linear(8, 4)
    assert OneDnnLinear(stock).weight is stock.weight


def test_which_product_is_faster_is_measured_without_touching_settings():
    threads = torch.get_num_threads()
    assert is_onednn_faster(64, 128) in (True, False)
    assert torch.get_num_threads() == threads
