import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv*", ".cache", ".hypothesis", ".pytest_cache", ".ruff_cache", "__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy of the repository, so that leavings of older builds do not count."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(*LEFT_OUT, "build", "dist", "out", "out-*")
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder)], cwd=folder / "source", check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_engine_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {"ticket_engine", "ticket_engine-0.1.0.dist-info"}


def test_the_wheel_holds_every_module_of_the_engine(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.startswith("ticket_engine/") and name.endswith(".py")}
    assert inside == {f"ticket_engine/{path.name}" for path in (ROOT / "src" / "ticket_engine").glob("*.py")}


def test_the_wheel_requires_neither_prefect_nor_great_expectations_unless_asked(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read("ticket_engine-0.1.0.dist-info/METADATA").decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    always = [line for line in required if "extra ==" not in line]
    assert any("torch" in line for line in always)
    assert not [line for line in always if "prefect" in line or "great-expectations" in line]
