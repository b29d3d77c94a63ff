"""The run's day is that of the deployment's time zone, whatever the worker's."""

from datetime import UTC, date, datetime
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from tasks import naming
from ticket_engine.settings import RunSettings


@pytest.mark.parametrize(
    ("zone", "day"),
    [("Europe/Berlin", date(2026, 7, 2)), ("UTC", date(2026, 7, 1)), ("America/Lima", date(2026, 7, 1))],
)
def test_a_run_scheduled_soon_after_midnight_belongs_to_the_day_of_its_time_zone(
    zone: str, day: date, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = datetime(2026, 7, 1, 22, 30, tzinfo=UTC)
    monkeypatch.setattr(naming, "flow_run", SimpleNamespace(scheduled_start_time=moment))
    assert naming.scheduled_day(ZoneInfo(zone)) == day


def test_a_time_zone_that_does_not_exist_is_refused_with_its_name() -> None:
    with pytest.raises(ValidationError, match="no time zone 'Berlin'"):
        RunSettings(input="a", labels="b", output="c", time_zone="Berlin")
