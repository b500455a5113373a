"""Moments in a profile, read with their zone and kept in UTC, and days."""

from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator

from .strict import broken_rule


def now() -> datetime:
    """Return the present moment, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def _parse_time(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise broken_rule("it must be a time; write it like 2026-11-30T09:00:00Z") from None


def _to_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise broken_rule("it is no time in UTC; write it like 2026-11-30T09:00:00Z") from None


def _parse_day(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise broken_rule("it must be a day; write it like 2026-11-30") from None


Day = Annotated[date, BeforeValidator(_parse_day)]
Time = Annotated[AwareDatetime, BeforeValidator(_parse_time), AfterValidator(_to_utc)]
