import json

import pytest
import torch

from ticket_engine.probe import ONE_THREAD_GAIN, Choice, Speed, choose_speed, processors


def test_the_fastest_format_is_chosen_and_in_it_the_split_that_a_pass_is_faster_in() -> None:
    choice = choose_speed(64, 128, dtype="auto", threads=None, workers=None)
    fastest = max(choice.measured, key=lambda speed: speed.tera_flops)
    assert choice.dtype == fastest.dtype
    expected = {
        speed.threads: speed.tera_flops * (ONE_THREAD_GAIN if speed.threads == 1 else 1)
        for speed in choice.measured
        if speed.dtype == choice.dtype
    }
    assert choice.threads == max(expected, key=expected.get)
    best = choice.measured[0]
    assert (choice.dtype, choice.threads, choice.workers) == (best.dtype, best.threads, best.workers)
    assert all(speed.tera_flops > 0 for speed in choice.measured)


def test_every_allowed_number_format_is_tried_with_every_split_of_the_processors() -> None:
    choice = choose_speed(64, 128, dtype="auto", threads=None, workers=None)
    tried = {(speed.dtype, speed.threads, speed.workers) for speed in choice.measured}
    cores = processors()
    assert tried == {
        (dtype, threads, workers) for dtype in ("float32", "bfloat16") for threads, workers in ((cores, 1), (1, cores))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_number_format_that_is_asked_for_is_the_only_one_tried(dtype: str) -> None:
    choice = choose_speed(64, 128, dtype=dtype, threads=1, workers=1)
    assert [(speed.dtype, speed.threads, speed.workers) for speed in choice.measured] == [(dtype, 1, 1)]
    assert choice.dtype == dtype


def test_threads_and_workers_that_are_asked_for_are_kept_and_the_other_one_fills_the_processors() -> None:
    cores = processors()
    made = choose_speed(64, 128, dtype="float32", threads=1, workers=None)
    assert (made.threads, made.workers) == (1, cores)
    made = choose_speed(64, 128, dtype="float32", threads=None, workers=cores + 1)
    assert (made.threads, made.workers) == (1, cores + 1)
    made = choose_speed(64, 128, dtype="float32", threads=2, workers=3)
    assert (made.threads, made.workers) == (2, 3)


def test_the_probe_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    choose_speed(64, 128, dtype="float32", threads=before + 1, workers=1)
    assert torch.get_num_threads() == before


def test_what_was_measured_goes_into_the_manifest_as_json() -> None:
    choice = choose_speed(64, 128, dtype="float32", threads=1, workers=1)
    made = json.loads(json.dumps(choice.as_dict()))
    assert made["dtype"] == "float32"
    assert made["measured"][0]["tera_flops"] == choice.measured[0].tera_flops


def measured(**speeds: float) -> Choice:
    """Choice of the fastest of some number formats."""
    found = sorted((Speed(name, 1, 2, value) for name, value in speeds.items()), key=lambda speed: -speed.tera_flops)
    return Choice(found[0].dtype, 1, 2, tuple(found))


def test_a_kept_number_format_survives_a_busy_probe_but_not_a_machine_that_is_slow_in_it() -> None:
    busy, other_machine = measured(bfloat16=0.2, float32=0.3), measured(bfloat16=0.002, float32=0.3)
    assert busy.in_format("bfloat16").dtype == "bfloat16"
    assert busy.in_format("bfloat16").measured == busy.measured
    assert other_machine.in_format("bfloat16").dtype == "float32"
    assert busy.in_format("float16").dtype == "float32"  # not measured here
