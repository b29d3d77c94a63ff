"""Number format, threads and pass size chosen by measurement on this machine."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ticket_engine.products import is_onednn_faster, onednn_linear

log = logging.getLogger(__name__)

PROBE_TOKENS = 512
SECONDS_EACH = 0.12
ONE_THREAD_GAIN = 1.3  # share of the peak of its products that a pass reaches: 0.80 alone, 0.62 with two threads
MOST_LOSS = 4.0  # the number format of a store is kept as long as it is no slower than this here


@dataclass(frozen=True, slots=True)
class Speed:
    """Matrix-product throughput of one way to use the machine.

    ``workers`` passes run at once, each on ``threads`` processor threads.
    """

    dtype: str
    threads: int
    workers: int
    tera_flops: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What the probe chose, and everything that it measured, best first."""

    dtype: str
    threads: int
    workers: int
    measured: tuple[Speed, ...]

    def as_dict(self) -> dict:
        """For the manifest, in types that JSON keeps."""
        return asdict(self) | {"measured": [asdict(speed) for speed in self.measured]}

    def in_format(self, dtype: str) -> "Choice":
        """The same in another number format, split as is best for it; unchanged if that is much slower here.

        A busy moment bends a measurement by a factor of two; another machine, one without a matrix unit, by far more.
        """
        others = [speed for speed in self.measured if speed.dtype == dtype]
        if not others or self.measured[0].tera_flops > MOST_LOSS * others[0].tera_flops:
            return self
        return Choice(dtype, others[0].threads, others[0].workers, self.measured)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_speed(hidden: int, inner: int, *, dtype: str, threads: int | None, workers: int | None) -> Choice:
    """The fastest number format and split of the processors for matrix products of a model's size.

    Tries one worker on all processors against one worker a processor, in each number format allowed,
    for about a tenth of a second each. A split with one thread a pass counts a little more than its products
    show, since the rest of a pass is faster in it. float16 is not tried by itself: no common CPU is fast in it.

    Args:
        hidden: Width of the model.
        inner: Width of its feed-forward layer.
        dtype: ``auto`` or the only format to use.
        threads: Threads of a pass, or None to choose.
        workers: Passes at once, or None to choose.
    """
    dtypes = ("float32", "bfloat16") if dtype == "auto" else (dtype,)
    cores = processors()
    splits = {(cores, 1), (1, cores)} if threads is None and workers is None else {_split(cores, threads, workers)}
    measured = [
        Speed(name, split[0], split[1], round(throughput(name, *split, hidden, inner), 4))
        for name in dtypes
        for split in sorted(splits)
    ]
    fastest = max(measured, key=lambda speed: speed.tera_flops).dtype
    measured.sort(key=lambda speed: (speed.dtype == fastest, _expected(speed)), reverse=True)
    best = measured[0]
    log.info("Probe: %s, %d thread(s) x %d worker(s)", best.dtype, best.threads, best.workers)
    return Choice(best.dtype, best.threads, best.workers, tuple(measured))


def _expected(speed: Speed) -> float:
    return speed.tera_flops * (ONE_THREAD_GAIN if speed.threads == 1 else 1)


def _split(cores: int, threads: int | None, workers: int | None) -> tuple[int, int]:
    if threads is None:
        return max(1, cores // workers), workers
    return threads, max(1, cores // threads) if workers is None else workers


def throughput(dtype: str, threads: int, workers: int, hidden: int, inner: int) -> float:
    """TFLOP/s of all workers together on a feed-forward layer's products, measured for a tenth of a second.

    Args:
        dtype: Number format.
        threads: Threads of each worker.
        workers: How many at once.
        hidden: Width of the model.
        inner: Width of its feed-forward layer.
    """
    number = getattr(torch, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows, weight = torch.ones(PROBE_TOKENS, hidden, dtype=number), torch.ones(inner, hidden, dtype=number)
    faster = dtype == "float32" and is_onednn_faster(hidden, inner)
    product = onednn_linear if faster else nn.functional.linear

    @torch.inference_mode()
    def work() -> float:
        torch.set_num_threads(threads)
        product(rows, weight)
        products, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS_EACH:
            product(rows, weight)
            products += 1
        return 2 * PROBE_TOKENS * hidden * inner * products / (time.perf_counter() - start) / 1e12

    try:
        with ThreadPoolExecutor(workers) as pool:
            return sum(future.result() for future in [pool.submit(work) for _ in range(workers)])
    finally:
        torch.set_num_threads(before)
