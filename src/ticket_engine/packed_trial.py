"""Whether a kind of model can run packed: tried on a tiny random model of that kind, before any weights are loaded.

A model class may say that its attention is one of transformers' shared functions and still do more around it
(another mask, a difference of two attentions, queries reshaped in a way of its own). A trial of a few
thousand weights shows it in a fraction of a second.
"""

import copy
import logging

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ticket_engine import attention
from ticket_engine.label_trie import build_trie
from ticket_engine.scoring import Batch, compute_prefix, pack

MOST_DIFFERENCE = 1e-3  # of hidden states in float32, as a share of their length
_LENGTHS = (9, 9, 4)
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
_NO_NODES = build_trie(((0,),))

log = logging.getLogger(__name__)


@torch.inference_mode()
def is_exact_when_packed(config: PreTrainedConfig) -> bool | None:
    """Whether a packed row gives a tiny model of this kind the hidden states of each ticket alone; None: not known.

    Args:
        config: Of the real model; only its kind and options are used, not its size.
    """
    try:
        model = _small_model(config)
    except Exception as error:  # noqa: BLE001, classes refuse sizes in many ways; loading checks the real model
        log.debug("No trial of %s: %s", config.model_type, type(error).__name__)
        return None
    try:
        return _distance(model) <= MOST_DIFFERENCE
    except (TypeError, RuntimeError, IndexError, AttributeError, ValueError) as error:
        log.debug("%s does not run packed: %s", config.model_type, type(error).__name__)
        return False


def attention_view(model: PreTrainedModel) -> PreTrainedModel:
    """A second set of modules over the same weights whose attention is `attention.PACKED`."""
    attention.register()
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.set_attn_implementation(attention.PACKED)
    return view


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    given = config.to_dict()
    fields = given | {name: value for name, value in _SMALL.items() if given.get(name) is not None}
    fields |= {name: None for name in given if name.endswith("_token_id")}
    if given.get("num_key_value_heads") == given.get("num_attention_heads"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if given.get("layer_types"):
        fields["layer_types"] = list(given["layer_types"][: fields["num_hidden_layers"]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(type(config)(**fields), dtype=torch.float32).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0.0, 0.25)
    return model.requires_grad_(False)


def _distance(model: PreTrainedModel) -> float:
    generator = np.random.default_rng(0)
    front, *tickets = (generator.integers(1, _SMALL["vocab_size"], length) for length in (5, *_LENGTHS))
    prefix = compute_prefix(model, tuple(front.tolist()))
    ids, positions, layout = pack(Batch(np.concatenate(tickets), np.array(_LENGTHS)), prefix, _NO_NODES)
    decoder = attention_view(model).get_decoder()
    packed = decoder(ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state[0]
    alone = [
        model.get_decoder()(torch.from_numpy(np.concatenate([front, ticket]))[None], use_cache=False)
        for ticket in tickets
    ]
    own = torch.cat([output.last_hidden_state[0, len(front) :] for output in alone])
    return float(((packed - own).norm(dim=1) / own.norm(dim=1)).max())
