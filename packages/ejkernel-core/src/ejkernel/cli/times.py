"""Reads points in time on the command line and in stored entries."""

import datetime
import re

import click

AGO = re.compile(r"(\d{1,5})([hdw])", re.ASCII)
AGE_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def parse_time(text: str) -> datetime.datetime:
    """Reads a point in time that a user typed: a date, a date with a time, or an age such as `7d`.

    Args:
        text: ISO 8601, in UTC unless it names an offset; or a number of hours, days or weeks ago: `12h`, `7d`, `2w`.

    Raises:
        click.BadParameter: The text is neither.
    """
    ago = AGO.fullmatch(text.strip())
    if ago is not None:
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(**{AGE_UNITS[ago[2]]: int(ago[1])})
    time = parse_iso_time(text.strip())
    if time is None:
        raise click.BadParameter(
            f"got {text!r}, wants an ISO 8601 date or time in UTC, such as 2026-11-20 or 2026-11-20T18:30, or an age "
            "in hours, days or weeks, such as 12h, 7d or 2w"
        )
    return time


def parse_iso_time(text: str) -> datetime.datetime | None:
    """Reads an ISO 8601 date or time, in UTC unless it names an offset; None if the text is neither."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time
