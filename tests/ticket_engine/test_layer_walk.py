"""Hidden states between the layers of many kinds of models: those of the model's own forward, or refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ticket_engine.engine import Engine
from ticket_engine.errors import ModelError
from ticket_engine.label_trie import build_trie
from ticket_engine.layer_walk import Rest, walk
from ticket_engine.models import load_weights
from ticket_engine.scoring import Batch, pack, packed_layout

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "granite",
    "granite_moe",
    "cohere",
    "codegen",
    "olmo2",
    "starcoder2",
    "glm4",
    "qwen3_moe",
]
NO_NODES = build_trie(((0,),))


def own_states(folder: Path, prompt: list[int]) -> list[torch.Tensor]:
    """Hidden states after 1, 2, ... layers of a plain model, the last behind the final norm, ``(tokens, hidden)``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_decoder()
    with torch.no_grad():
        output = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    return [*(state[0] for state in output.hidden_states[1:-1]), output.last_hidden_state[0]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix", "whole"])
def test_hidden_states_of_a_packed_pass_are_those_of_the_models_own_forward(
    name: str, prefix_cache: bool, tiny_model: Callable[[str], Path], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(name, execution="packed", prefix_cache=prefix_cache)
    prompt = engine.spec.prompt
    rng = np.random.default_rng(0)
    tickets = [rng.integers(3, 500, length) for length in (40, 17, 17, 2)]
    states = [own_states(tiny_model(name), [*prompt.prefix_ids, *ids, *prompt.ending_ids]) for ids in tickets]
    made = engine.features(tickets, tuple(range(1, len(states[0]) + 1)))
    front = len(prompt.prefix_ids)
    for depth, features in enumerate(made):
        for row, ids in enumerate(tickets):
            own = states[row][depth].numpy()
            scale = np.abs(own).max()
            np.testing.assert_allclose(features.last[row], own[-1], atol=1e-4 * scale)
            np.testing.assert_allclose(features.mean[row], own[front : front + len(ids)].mean(0), atol=1e-4 * scale)
    engine.check_features((1, len(states[0])))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_cut_out_between_layers_change_nothing_for_the_rows_that_stay(
    name: str, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(name, execution="packed")
    rng = np.random.default_rng(1)
    lengths = np.array([21, 9, 9, 4])
    batch = Batch(rng.integers(3, 500, lengths.sum()), lengths)
    layers = engine.view.config.get_text_config().num_hidden_layers
    whole, cut = {}, {}
    rows = np.concatenate([np.arange(21, 30), np.arange(39, 43)])  # the second ticket and the last
    inputs = pack(batch, engine.prefix, NO_NODES)
    rest = Rest(torch.from_numpy(rows), packed_layout(lengths[[1, 3]], engine.prefix, NO_NODES))
    depths = tuple(range(1, layers + 1))
    with torch.inference_mode():
        walk(engine.view, inputs, depths, lambda depth, hidden: whole.update({depth: hidden}))
        walk(
            engine.view,
            inputs,
            depths,
            lambda depth, hidden: (cut.update({depth: hidden}), rest if depth == 1 else None)[1],
        )
    assert cut[1].shape == whole[1].shape
    for depth in depths[1:]:
        scale = float(whole[depth].abs().max())
        torch.testing.assert_close(cut[depth], whole[depth][:, rows], atol=1e-4 * scale, rtol=0)


def test_no_layer_runs_behind_the_last_depth_or_when_no_row_is_left(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("llama", execution="packed")
    ran: list[int] = []
    layers = engine.view.get_decoder().layers
    handles = [layer.register_forward_pre_hook(lambda *_, n=n: ran.append(n)) for n, layer in enumerate(layers, 1)]
    inputs = pack(Batch(np.arange(3, 9), np.array([4, 2])), engine.prefix, NO_NODES)
    try:
        with torch.inference_mode():
            walk(engine.view, inputs, (1, 2), lambda *_: None)
            assert ran == [1, 2]
            ran.clear()
            nothing = Rest(torch.zeros(0, dtype=torch.int64), inputs[2])
            walk(engine.view, inputs, (1, 2, 3), lambda *_: nothing)
            assert ran == [1]
            ran.clear()
            engine.score([np.arange(3, 9)])
            assert ran == [1, 2, 3]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["nemotron", "diffllama", "jetmoe"])
def test_hidden_states_that_are_not_the_models_own_are_refused(name: str, make_engine: Callable[..., Engine]) -> None:
    spec = replace(make_engine(name).spec, execution="packed")
    engine = Engine(spec, load_weights(Path(spec.model_folder), "float32"))
    with pytest.raises(ModelError, match=r"[Hh]eads do not work with it"):
        engine.check_features((1, 2))
