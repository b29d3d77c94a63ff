"""Matrix products of linear layers by the faster of the two libraries that PyTorch brings along.

In float32 PyTorch calls MKL, which runs at half speed and less on processors that are not Intel's
(development machine, Zen 5: oneDNN is 2.2 x as fast for 128 rows and more, same rounding error).
16-bit formats go through oneDNN anyway.
"""

import statistics
import time

import torch
from torch import Tensor, nn

_TRIALS = 5
_ROWS = 256
_WORTH = 1.1


def has_onednn() -> bool:
    """Whether this build of PyTorch offers oneDNN's product for plain weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias`` through oneDNN; shapes as in `torch.nn.functional.linear`."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class OneDnnLinear(nn.Module):
    """A linear layer over the weights of another, computed by oneDNN."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = stock.weight, stock.bias
        self.in_features, self.out_features = stock.in_features, stock.out_features

    def forward(self, rows: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return onednn_linear(rows, self.weight, self.bias)


def is_onednn_faster(hidden: int, inner: int) -> bool:
    """Whether oneDNN beats PyTorch's own float32 product here by a tenth, from alternated trials (some ms).

    Args:
        hidden: Columns of the rows.
        inner: Rows of the weights.
    """
    if not has_onednn():
        return False
    rows, weight = torch.ones(_ROWS, hidden), torch.ones(inner, hidden)
    ratios = []
    with torch.inference_mode():
        onednn_linear(rows, weight)
        for _ in range(_TRIALS):
            start = time.perf_counter()
            nn.functional.linear(rows, weight)
            middle = time.perf_counter()
            onednn_linear(rows, weight)
            ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios) > _WORTH
