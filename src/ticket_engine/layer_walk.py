"""A packed pass of the model's own forward that can be looked at, shortened or ended between two layers.

Models differ in what stands around their layers: scaled embeddings, learnt positions, norms of any name. So nothing
of a model is rebuilt here. Its own forward runs, with hooks on its layers that do nothing outside of `walk`::

    embeddings, positions ─ layer 1 ─ ... ─ layer d ─┬─ layer d + 1 ─ ... ─ layer n ─ norm
                                                     └ visit(d, hidden): look, keep some rows, or end here
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from ticket_engine.attention import PackedLayout
from ticket_engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rest:
    """What goes on after a visit: some rows of the packed row, int64, and where the tickets lie in them."""

    rows: Tensor
    layout: PackedLayout


Visit = Callable[[int, Tensor], Rest | None]


class _Walk:
    """State of one pass: where to stop, and which rows of the whole row are left."""

    def __init__(self, tokens: int, depths: tuple[int, ...], visit: Visit) -> None:
        self.tokens, self.depths, self.visit = tokens, depths, visit
        self.rows: Tensor | None = None
        self.layout: PackedLayout | None = None
        self.seen: list[int] = []

    def stop(self, depth: int, hidden: Tensor) -> Tensor:
        """The rows of a layer's output that go on; raises `_End` where none needs to."""
        self.seen.append(depth)
        rest = self.visit(depth, hidden)
        if depth == self.depths[-1]:
            raise _End
        if rest is None:
            return hidden
        if not len(rest.rows):
            raise _End
        self.rows = rest.rows if self.rows is None else self.rows[rest.rows]
        self.layout = rest.layout
        return hidden[:, rest.rows]

    def cut(self, value: object) -> object:
        """An argument of a layer with the rows that are left, where it has a row a token."""
        if isinstance(value, Tensor):
            return value[:, self.rows] if value.ndim > 1 and value.shape[1] == self.tokens else value
        if isinstance(value, PackedLayout):
            return self.layout
        if isinstance(value, tuple | list):
            return type(value)(self.cut(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self.cut(item) for key, item in value.items()}
        return value


class _End(Exception):
    """Nothing of the rest of the pass is needed."""


_walk: ContextVar[_Walk | None] = ContextVar("walk", default=None)


def layers_of(decoder: nn.Module) -> nn.ModuleList | None:
    """A decoder's layers, whatever it calls them; None if they cannot be told."""
    count = decoder.config.get_text_config().num_hidden_layers
    found = [part for part in decoder.children() if isinstance(part, nn.ModuleList) and len(part) == count]
    return found[0] if len(found) == 1 else None


def watch_layers(model: PreTrainedModel) -> None:
    """Put the hooks of `walk` on a model's layers, once; models whose layers cannot be told stay as they are."""
    layers = layers_of(model.get_decoder()) or ()
    for depth, layer in enumerate(layers, 1):
        layer.register_forward_pre_hook(_before, with_kwargs=True)
        layer.register_forward_hook(_after(depth) if depth < len(layers) else _after_all)


def walk(
    model: PreTrainedModel, inputs: tuple[Tensor, Tensor, PackedLayout], depths: tuple[int, ...], visit: Visit
) -> None:
    """Run a packed pass and visit it after some of its layers; no layer behind the last of them runs.

    Args:
        model: A view whose attention is `attention.PACKED`, with watched layers.
        inputs: From `scoring.pack`.
        depths: Numbers of layers, growing, at least 1.
        visit: Gets depth and hidden states ``(1, tokens left, hidden)``, those of all layers after the final norm;
            says what goes on (None: everything).

    Raises:
        ModelError: The model's layers do not run one after the other as its own modules.
    """
    token_ids, positions, layout = inputs
    state = _Walk(token_ids.shape[1], depths, visit)
    token = _walk.set(state)
    try:
        decoder = model.get_decoder()
        hidden = decoder(token_ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state
        if depths[-1] == decoder.config.get_text_config().num_hidden_layers:
            state.stop(depths[-1], hidden if state.rows is None else hidden[:, state.rows])
    except _End:
        pass
    finally:
        _walk.reset(token)
    if tuple(state.seen) != depths[: len(state.seen)] or not state.seen:
        raise ModelError(
            f"This model's layers are not run one after the other (seen: {state.seen}, asked: {list(depths)}): its "
            "hidden states cannot be read. Leave out the head, or choose another model."
        )


def _before(_layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    state = _walk.get()
    if state is None or state.rows is None:
        return None
    return args[:1] + state.cut(args[1:]), state.cut(kwargs)


def _after(depth: int) -> Callable:
    def hook(_layer: nn.Module, _args: tuple, output: object) -> object:
        state = _walk.get()
        if state is None or depth not in state.depths:
            return None
        whole = isinstance(output, Tensor)
        hidden = state.stop(depth, output if whole else output[0])
        return hidden if whole else (hidden, *output[1:])

    return hook


def _after_all(_layer: nn.Module, _args: tuple, output: object) -> object:
    """All rows again, those that were cut out as zeros: some models lay their output out by its first shape."""
    state = _walk.get()
    if state is None or state.rows is None:
        return None
    whole = isinstance(output, Tensor)
    hidden = output if whole else output[0]
    spread = hidden.new_zeros(1, state.tokens, hidden.shape[2])
    spread[:, state.rows] = hidden
    return spread if whole else (spread, *output[1:])
