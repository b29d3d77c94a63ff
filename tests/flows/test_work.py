"""How much the model works: counted as token ids that go through its embedding, whoever calls it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

Run = Callable[..., tuple[int, str, str]]


class Work:
    """Token ids that went through any model's embedding since the last look."""

    def __init__(self) -> None:
        self.tokens = 0

    def look(self) -> int:
        """The tokens since the last look."""
        tokens, self.tokens = self.tokens, 0
        return tokens


@pytest.fixture
def work() -> Iterator[Work]:
    """Counts by a hook of PyTorch on every module of this process."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    counted = Work()

    def count(module: torch.nn.Module, inputs: tuple, _output: object) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings > 64:  # not the trial's tiny model
            counted.tokens += inputs[0].numel()

    hook = register_module_forward_hook(count)
    yield counted
    hook.remove()


def tickets(first: int, count: int) -> pl.DataFrame:
    """Tickets with texts of their own, in lengths that repeat every four."""
    numbers = range(first, first + count)
    return pl.DataFrame(
        {
            "ticket_id": list(numbers),
            "body": [f"Parcel {10_000 + n} has not come. " * (3 + n % 4) for n in numbers],
        }
    )


def test_a_second_run_does_no_forward_pass_and_ten_percent_new_tickets_take_ten_percent_of_the_work(
    run_cli: Run, work: Work, tmp_path: Path
) -> None:
    source, output = tmp_path / "tickets.parquet", tmp_path / "out"
    options = {"input": source, "output": output, "spot_check": 0, "workers": 1}
    spent = []
    for table in (tickets(0, 400), tickets(0, 400), tickets(40, 400)):  # the third: 40 gone, 40 new
        table.write_parquet(source)
        code, _, errors = run_cli(**options)
        assert code == 0, errors
        spent.append(work.look())
    first, again, tenth = spent
    assert again == 0
    assert tenth <= 0.11 * first
