"""The last layer's feed-forward part computed only where its result is used.

Scores need the last hidden state of each ticket's last position (and of label nodes) and no other. The
last layer's attention still needs keys and values of every position, but its feed-forward part, three
quarters of the layer's arithmetic, is computed for the needed rows only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

_rows: ContextVar[Tensor | None] = ContextVar("needed_rows", default=None)


class NeededRows(nn.Module):
    """A feed-forward module whose output is 0 at rows that nobody reads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        """Output of the inner module, ``(1, tokens, hidden)``."""
        rows = _rows.get()
        if rows is None:
            return self.inner(hidden)
        output = hidden.new_zeros(hidden.shape)
        output[:, rows] = self.inner(hidden[:, rows])
        return output


@contextmanager
def needed_rows(rows: Tensor) -> Iterator[None]:
    """Within this block and thread, only ``rows`` (int64) of the last layer's output are used."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def finish_needed_rows_only(decoder: nn.Module) -> None:
    """Wrap the last layer's ``mlp`` in place, where the decoder is built of layers that have one."""
    layers = getattr(decoder, "layers", None)
    if layers is not None and isinstance(getattr(layers[-1], "mlp", None), nn.Module):
        layers[-1].mlp = NeededRows(layers[-1].mlp)
