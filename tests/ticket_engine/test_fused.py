import copy

import pytest
import torch
from torch import nn

from ticket_engine import fused
from ticket_engine.fused import FusedFeedForward, FusedNorm, fuse


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hidden_states(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.get_decoder()(ids, use_cache=False).last_hidden_state.float()


def test_a_fused_model_answers_like_the_stock_one(each_loaded):
    ids = torch.arange(1, 24)[None]
    view = copy.deepcopy(each_loaded)
    fuse(view)
    difference = (hidden_states(view, ids) - hidden_states(each_loaded, ids)).abs().max()
    assert difference <= 1e-4


def test_llama_has_all_its_norms_and_feed_forward_parts_fused(tiny_model):
    from ticket_engine.models import load_weights

    view = load_weights(tiny_model("llama"), "float32")
    layers = view.config.num_hidden_layers
    fuse(view)
    parts = [type(part) for part in view.modules()]
    assert parts.count(FusedNorm) == 2 * layers + 1
    assert parts.count(FusedFeedForward) == layers


class OffsetNorm(nn.Module):
    """Looks like the usual norm, scales by one plus the weight as Gemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), 0.3))
        self.variance_epsilon = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class GeluFeedForward(nn.Module):
    """The names of the usual feed-forward part with another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.gelu(self.gate_proj(hidden)) * self.up_proj(hidden))


OffsetNorm.__name__ = "SomeRMSNorm"


@pytest.mark.parametrize("part", [OffsetNorm(), GeluFeedForward()])
def test_a_part_that_looks_right_but_answers_differently_stays(part):
    with torch.inference_mode():
        assert fused._fused(part) is None


def test_with_two_threads_the_stock_part_answers():
    torch.manual_seed(0)
    norm = nn.RMSNorm(16, eps=1e-6)
    with torch.inference_mode():
        replaced = fused._fused(norm)
        torch.set_num_threads(2)
        rows = torch.randn(1, 3, 16)
        assert torch.equal(replaced(rows), norm(rows))
