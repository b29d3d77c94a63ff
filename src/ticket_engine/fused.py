"""Norms and gated feed-forward parts of a model computed by `kernels` wherever they prove to be the same.

Models write these parts in their own classes with their own names, so nothing is assumed from a name: a
part that looks right is tried on random numbers, and only replaced if its answer is the stock one up to
rounding.
"""

import torch
from torch import Tensor, nn

from ticket_engine import kernels
from ticket_engine.products import OneDnnLinear, is_onednn_faster

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class FusedNorm(nn.Module):
    """A root-mean-square norm in one walk; the stock module where the kernels are not available."""

    def __init__(self, stock: nn.Module, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.stock = stock
        self.scale = weight
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm of the last dimension, same shape."""
        if not kernels.available(hidden.dtype):
            return self.stock(hidden)
        return kernels.rms_norm(hidden.contiguous(), self.scale, self.epsilon)


class FusedFeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without buffers for the activation and the product."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, hidden: Tensor) -> Tensor:
        """Output of the feed-forward part, shape of ``hidden``."""
        if not kernels.available(hidden.dtype):
            return self.stock(hidden)
        gate, up = self.stock.gate_proj(hidden), self.stock.up_proj(hidden)
        return self.stock.down_proj(kernels.gated_silu_(gate, up))


def fuse(model: nn.Module) -> int:
    """Replace the parts of ``model`` that prove equal, in place; returns how many.

    The model keeps its weights. Called on the packed view only: the stock model stays as transformers made it.
    """
    replaced = _use_faster_products(model)
    if not kernels.available(model.dtype):
        return replaced
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, part in list(parent.named_children()):
                candidate = _fused(part)
                if candidate is not None:
                    setattr(parent, name, candidate)
                    replaced += 1
    return replaced


def _use_faster_products(model: nn.Module) -> int:
    """Replace the decoder's float32 linear layers where oneDNN is faster."""
    found = [
        (parent, name, part)
        for parent in model.get_decoder().modules()
        for name, part in parent.named_children()
        if type(part) is nn.Linear
    ]
    if model.dtype != torch.float32 or not found:
        return 0
    largest = max((part for _, _, part in found), key=lambda part: part.weight.numel())
    if not is_onednn_faster(largest.in_features, largest.out_features):
        return 0
    for parent, name, part in found:
        setattr(parent, name, OneDnnLinear(part))
    return len(found)


def _fused(part: nn.Module) -> nn.Module | None:
    """The part's replacement, or None if it is something else or answers differently."""
    if all(
        isinstance(getattr(part, name, None), nn.Linear | OneDnnLinear)
        for name in ("gate_proj", "up_proj", "down_proj")
    ):
        candidate, width = FusedFeedForward(part), part.gate_proj.in_features
        return candidate if _same(part, candidate, width, part.gate_proj.weight.dtype) else None
    weight = getattr(part, "weight", None)
    epsilon = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if "RMSNorm" not in type(part).__name__ or weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    candidate = FusedNorm(part, weight, epsilon)
    return candidate if _same(part, candidate, len(weight), weight.dtype) else None


def _same(stock: nn.Module, candidate: nn.Module, width: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 5, width, generator=generator).to(dtype)
    try:
        expected, got = stock(sample).float(), candidate(sample).float()
    except (TypeError, RuntimeError):
        return False
    scale = expected.abs().max().clamp(min=1e-30)
    return bool(((expected - got).abs() <= _ROUNDING[dtype] * scale).all())
