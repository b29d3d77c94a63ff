import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ticket_engine.errors import ModelError
from ticket_engine.models import find_model, hash_model, load_tokenizer, load_weights


@pytest.fixture
def copied(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model folder that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def test_a_folder_with_a_model_is_taken_as_it_is(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    assert find_model(str(folder)) == folder.resolve()


def test_an_existing_folder_wins_over_the_hub(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied.parent / "owner").mkdir()
    copied.rename(copied.parent / "owner" / "name")
    monkeypatch.chdir(copied.parent)
    assert find_model("owner/name") == copied.parent / "owner" / "name"


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "./none", "/none/here", "~/none"])
def test_a_name_that_can_be_nothing_is_an_error_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        find_model(name)


def test_a_hub_that_cannot_be_reached_is_an_error_that_names_three_ways_out(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused at once
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        code = (
            "from ticket_engine.errors import ModelError\n"
            "from ticket_engine.models import find_model\n"
            "try: print('found', find_model('Qwen/Qwen2.5-0.5B-Instruct'))\n"
            "except ModelError as error: print(error)\n"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    message = done.stdout.strip()
    assert message.startswith("The model Qwen/Qwen2.5-0.5B-Instruct cannot be fetched from the hub")
    assert "HF_ENDPOINT" in message
    assert "a local folder with --model" in message
    assert "--model smollm2-135m" in message
    assert "\n" not in message


def test_the_hash_changes_with_weights_configuration_and_tokenizer_and_with_nothing_else(copied: Path) -> None:
    hashes = [hash_model(copied)]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        path = copied / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        hashes.append(hash_model(copied))
        path.write_bytes(before)
    assert len(set(hashes)) == 4
    (copied / "README.md").write_text("x")
    assert hash_model(copied) == hashes[0]


def test_weights_are_loaded_in_the_number_format_asked_for_and_need_no_gradients(copied: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        model = load_weights(copied, dtype)
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())


def test_a_folder_without_tokenizer_is_an_error(copied: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(copied)


def break_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"these are no weights")


def lack_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def lack_one_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def be_unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of", "architectures": ["X"]}))


def be_no_decoder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))


def be_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def be_empty(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


BREAKAGES = [
    break_weights,
    break_header,
    lack_weights,
    lack_one_weight,
    be_unknown,
    be_no_decoder,
    be_no_json,
    be_empty,
]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_model_folder_is_an_error_of_one_line(
    copied: Path, breakage: Callable[[Path], None], make_run: Callable[..., Path]
) -> None:
    from ticket_engine.engine import load_engine

    breakage(copied)
    with pytest.raises(ModelError) as caught:
        load_engine(make_run([], model=copied))
    assert "\n" not in str(caught.value)
    assert str(copied) in str(caught.value)


@pytest.mark.slow
def test_the_embedded_model_is_converted_once_to_a_plain_folder(embedded_model: Path) -> None:
    weights = embedded_model / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert find_model("smollm2-135m") == embedded_model
    assert weights.stat().st_mtime_ns == before
    assert json.loads((embedded_model / "config.json").read_text())["model_type"] == "llama"
    model = load_weights(embedded_model, "float32")
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(embedded_model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_other_weights_in_any_form_that_loading_takes_are_another_model(tiny_model, tmp_path: Path) -> None:
    """Weights of the old form once had no part in the hash, and the old model's scores were published."""
    import torch

    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "old-form"))
    (folder / "model.safetensors").unlink()
    model, hashes, logits = load_weights(tiny_model("llama"), "float32"), [], []
    for scale in (1.0, 1.5):
        weights = {name: value * scale for name, value in model.state_dict().items()}
        torch.save(weights, folder / "pytorch_model.bin")
        hashes.append(hash_model(folder))
        logits.append(load_weights(folder, "float32")(torch.tensor([[3, 4, 5]])).logits)
    assert not torch.equal(*logits)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", ["merges.txt", "vocab.json", "additional_chat_templates/rag.jinja", "model-2.bin"])
def test_every_file_that_loading_may_read_counts_for_the_hash(tiny_model, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))
    before = hash_model(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert hash_model(folder) != before
    for other in ("README.md", ".gitattributes"):
        with_name = hash_model(folder)
        (folder / other).write_text("for people")
        assert hash_model(folder) == with_name
