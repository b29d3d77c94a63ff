import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import polars as pl
import pytest

from ticket_engine.errors import InputError, OutputError
from ticket_engine.ownership import MARK_FILE, RUN, mark
from ticket_engine.publish import (
    claimed_output,
    find_damage,
    find_earlier,
    keep_refused,
    previous_folder,
    publish,
    read_manifest,
    refused_folder,
    working_folder,
    write_manifest,
)
from ticket_engine.settings import RunSettings


def stage(folder: Path, run: int, rows: int = 3) -> Path:
    """A complete staged folder of one run: every file of it carries the run's number."""
    staged = folder / "staged"
    staged.mkdir(parents=True)
    pl.DataFrame({"run": [run] * rows}).write_parquet(staged / "predictions.parquet")
    pl.DataFrame({"run": [run] * 2}).write_parquet(staged / "quarantine.parquet")
    write_manifest(staged, {"run": run})
    return staged


def publish_run(output: Path, run: int) -> None:
    with claimed_output(output) as folder:
        publish(stage(folder, run), output)


def contents(folder: Path) -> dict[str, bytes]:
    """Name and content of each file but the mark."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != MARK_FILE}


def test_a_published_folder_holds_the_run_and_nothing_else_and_keeps_only_the_run_before(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    publish_run(output, 1)
    publish_run(output, 2)
    assert sorted(contents(output)) == ["manifest.json", "predictions.parquet", "quarantine.parquet"]
    assert pl.read_parquet(output / "predictions.parquet")["run"].to_list() == [2, 2, 2]
    assert read_manifest(output)["run"] == 2
    assert {path.name for path in output.parent.iterdir()} - {".out.lock"} == {"out", ".out.old"}
    assert read_manifest(previous_folder(output))["run"] == 1
    publish_run(output, 3)
    assert read_manifest(previous_folder(output))["run"] == 2


@pytest.mark.parametrize("template", ["run_date={run_date}/labels", "{year}/{month}/{day}"])
def test_a_run_of_one_day_is_compared_with_the_latest_day_before_it_that_was_published(
    tmp_path: Path, template: str
) -> None:
    template = str(tmp_path / template)

    def day(text: str, **changes: object) -> RunSettings:
        given = {"input": "x", "labels": "x", "output": template, "run_date": text} | changes
        return RunSettings(**given).resolved(date(2026, 1, 1))

    assert find_earlier(day("2026-11-30")) is None
    for text in ("2026-11-28", "2026-11-30", "2026-12-02"):
        publish_run(Path(day(text).output), 1)
    assert find_earlier(day("2026-12-01")) == Path(day("2026-11-30").output)
    assert find_earlier(day("2026-11-30")) == Path(day("2026-11-28").output)
    assert find_earlier(day("2026-11-28")) == Path(day("2026-11-28").output)  # its own, before it is replaced
    other = tmp_path / "other"
    assert find_earlier(day("2026-11-30", compare_with=str(other))) is None
    publish_run(other, 1)
    assert find_earlier(day("2026-11-30", compare_with=str(other))) == other


def test_an_output_without_a_day_is_compared_with_what_it_replaces(tmp_path: Path) -> None:
    settings = RunSettings(input="x", labels="x", output=str(tmp_path / "out")).resolved(date(2026, 1, 1))
    assert find_earlier(settings) is None
    publish_run(tmp_path / "out", 1)
    assert find_earlier(settings) == tmp_path / "out"


def test_the_manifest_carries_hash_bytes_and_rows_of_each_table(tmp_path: Path) -> None:
    publish_run(tmp_path / "out", 1)
    files = read_manifest(tmp_path / "out")["files"]
    assert {name: entry["rows"] for name, entry in files.items()} == {"predictions.parquet": 3, "quarantine.parquet": 2}
    for name, entry in files.items():
        assert entry["bytes"] == (tmp_path / "out" / name).stat().st_size
        assert len(entry["sha256"]) == 64
    assert find_damage(tmp_path / "out") == []


def test_a_reader_that_polls_always_finds_one_whole_run(tmp_path: Path) -> None:
    output = tmp_path / "out"
    publish_run(output, 0)
    done = threading.Event()
    begun = [0]
    seen: set[int] = set()
    wrong: list[str] = []

    def poll() -> None:
        while not done.is_set():
            before = begun[0]
            try:
                handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                wrong.append("the output folder was missing")
                continue
            try:
                runs = [_run_in(handle, name) for name in ("manifest.json", "predictions.parquet")]
            except FileNotFoundError as error:
                if begun[0] - before < 2:  # a reader may take as long as the next run takes
                    wrong.append(f"a file was missing: {error.filename}")
                continue
            finally:
                os.close(handle)
            seen.update(runs)
            if len(set(runs)) != 1:
                wrong.append(f"files of runs {runs} together")

    reader = threading.Thread(target=poll)
    reader.start()
    for run in range(1, 201):
        begun[0] = run
        publish_run(output, run)
    time.sleep(0.05)
    done.set()
    reader.join()
    assert wrong == []
    assert len(seen) > 5


def _run_in(folder: int, name: str) -> int:
    """The run's number in a file of an open folder."""
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
        return json.load(file)["run"] if name.endswith("json") else int(pl.read_parquet(file)["run"][0])


def test_a_folder_that_is_not_a_run_and_a_file_are_refused_untouched(tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_bytes(b"x")
    (tmp_path / "file").write_text("x")
    for output in (foreign, tmp_path / "file"):
        with pytest.raises(OutputError, match=r"was not made by classify-tickets"), claimed_output(output):
            pytest.fail("a foreign folder was claimed")
    assert contents(foreign) == {"holiday.jpg": b"x"}
    for output in (Path("/"), Path(".."), Path(".")):
        with pytest.raises(OutputError, match="cannot be an output folder"), claimed_output(output):
            pytest.fail("a folder without a name was claimed")


@pytest.mark.parametrize("name", ["out", ".out.work", ".out.old", "out.refused"])
@pytest.mark.parametrize("file", ["manifest.json", "holiday.jpg", MARK_FILE])
def test_what_somebody_else_made_is_neither_replaced_nor_removed(tmp_path: Path, name: str, file: str) -> None:
    """A web application has a manifest.json too, and another project may mark its folders."""
    foreign = tmp_path / name
    foreign.mkdir()
    (foreign / file).write_text('{"name": "a web application", "files": {}}')
    (foreign / "app.js").write_text("x")
    before = contents(foreign)
    with pytest.raises(OutputError, match="was not made by classify-tickets") as raised:
        publish_run(tmp_path / "out", 1)
    assert str(foreign) in str(raised.value)
    assert contents(foreign) == before
    assert name == "out" or not (tmp_path / "out").exists()


def test_what_came_into_the_way_of_a_running_run_is_not_replaced_either(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with claimed_output(output) as folder:
        staged = stage(folder, 1)
        output.mkdir()
        (output / "holiday.jpg").write_bytes(b"x")
        with pytest.raises(OutputError, match="was not made by classify-tickets"):
            publish(staged, output)
    assert contents(output) == {"holiday.jpg": b"x"}


def test_an_output_whose_manifest_is_damaged_is_told_at_the_start(tmp_path: Path) -> None:
    publish_run(tmp_path / "out", 1)
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(OutputError, match=r"move .* away"), claimed_output(tmp_path / "out"):
        pytest.fail("a damaged output was claimed")


def test_a_link_to_a_folder_stays_a_link_and_its_target_is_published_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "labels").mkdir()
    output = tmp_path / "out"
    output.symlink_to(tmp_path / "disk" / "labels")
    for run in (1, 2, 3):
        publish_run(output, run)
        assert output.is_symlink()
        assert read_manifest(output)["run"] == run
        assert read_manifest(tmp_path / "disk" / "labels")["run"] == run
    with claimed_output(output) as folder:
        assert folder.parent == tmp_path / "disk"
        kept = keep_refused(stage(folder, 4), output)
    assert kept == tmp_path / "disk" / "labels.refused"
    settings = RunSettings(input="x", labels="x", output=str(output)).resolved(date(2026, 1, 1))
    assert find_earlier(settings) == output


def test_a_link_that_leads_nowhere_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="leads nowhere"), claimed_output(tmp_path / "out"):
        pytest.fail("a dangling link was claimed")
    assert (tmp_path / "out").is_symlink()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("kind", ["disk", "folder of the same disk"])
def test_a_mount_point_is_refused_at_the_start_with_the_way_out(tmp_path: Path, kind: str) -> None:
    volume = tmp_path / "a volume"
    volume.mkdir()
    (tmp_path / "source").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.fsencode(volume)
    bind = 4096
    arguments = (b"tmpfs", target, b"tmpfs", 0, b"size=4m")
    if kind != "disk":
        arguments = (os.fsencode(tmp_path / "source"), target, None, bind, None)
    if libc.mount(*arguments):
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        with pytest.raises(OutputError, match="is a mount point") as raised, claimed_output(volume):
            pytest.fail("a mount point was claimed")
        assert str(volume / "labels") in str(raised.value)
        for run in (1, 2):
            publish_run(volume / "labels", run)
        assert read_manifest(volume / "labels")["run"] == 2
    finally:
        assert libc.umount2(target, 2) == 0  # MNT_DETACH


def test_an_empty_folder_may_be_published_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    publish_run(tmp_path / "out", 4)
    assert read_manifest(tmp_path / "out")["run"] == 4


def test_an_output_below_a_file_or_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"), claimed_output(tmp_path / "file" / "out"):
        pytest.fail("a folder below a file was claimed")


def test_a_second_run_to_the_same_output_is_refused_while_the_first_is_writing(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ticket_engine.errors import OutputError\n"
        "from ticket_engine.publish import claimed_output\n"
        "try:\n"
        "    with claimed_output(Path(sys.argv[1])): print('claimed')\n"
        "except OutputError as error: print(error)\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with claimed_output(tmp_path / "out") as folder:
        (folder / "precious").write_text("x")
        assert other_process() == f"Another run is writing to {tmp_path / 'out'}. Wait for it, or name another folder."
        assert (folder / "precious").exists()
    assert other_process() == "claimed"


def test_the_working_folder_is_empty_at_the_start_and_gone_at_the_end_even_after_an_error(tmp_path: Path) -> None:
    output = tmp_path / "out"
    working_folder(output).mkdir()
    mark(working_folder(output), RUN)
    (working_folder(output) / "leaving of a killed run").write_text("x")
    publish_run(output, 1)
    before = contents(output)

    def fail() -> None:
        with claimed_output(output) as folder:
            assert contents(folder) == {}
            stage(folder, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not working_folder(output).exists()
    assert contents(output) == before
    publish_run(output, 3)
    assert read_manifest(output)["run"] == 3


def test_an_error_of_the_run_itself_is_not_taken_for_one_of_the_output(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), claimed_output(tmp_path / "out"):
        raise PermissionError(13, "the tickets may not be read")


def test_a_refused_run_is_kept_beside_the_output_which_stays_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "out"
    publish_run(output, 1)
    before = contents(output)
    for run in (2, 3):
        with claimed_output(output) as folder:
            assert keep_refused(stage(folder, run), output) == refused_folder(output)
    assert contents(output) == before
    assert read_manifest(refused_folder(output))["run"] == 3
    assert find_damage(refused_folder(output)) == []


def damage_bytes(output: Path) -> None:
    path = output / "predictions.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_rows(output: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    manifest["files"]["quarantine.parquet"]["rows"] = 99
    (output / "manifest.json").write_text(json.dumps(manifest))


def damage_listing(output: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    del manifest["files"]["predictions.parquet"]
    (output / "manifest.json").write_text(json.dumps(manifest))
    (output / "predictions.parquet").unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda output: (output / "quarantine.parquet").unlink(), "quarantine.parquet is missing"),
        (damage_bytes, "predictions.parquet was changed after it was published"),
        (
            lambda output: (output / "predictions.parquet").write_bytes(b"PAR1"),
            "predictions.parquet was changed after it was published",
        ),
        (
            lambda output: (output / "quarantine.parquet").replace(output / "predictions.parquet"),
            "predictions.parquet was changed after it was published",
        ),
        (damage_rows, "quarantine.parquet has another number of rows than its manifest says"),
        (damage_listing, "predictions.parquet is missing"),
        (
            lambda output: (output / "manifest.json").write_text('{"files": {"predictions.parquet": {}}}'),
            "predictions.parquet was changed after it was published",
        ),
    ],
)
def test_each_kind_of_damage_to_a_published_folder_is_found(tmp_path: Path, damage, found: str) -> None:
    publish_run(tmp_path / "out", 1)
    damage(tmp_path / "out")
    assert found in find_damage(tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 3}', '{"files": {"predictions.parquet": 3}}'])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    publish_run(tmp_path / "out", 1)
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json (cannot be read|does not list the files)"):
        find_damage(tmp_path / "out")


def test_a_folder_without_manifest_is_not_a_published_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no manifest\.json"):
        find_damage(tmp_path)
