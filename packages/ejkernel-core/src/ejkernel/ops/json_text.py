"""Finds the line of a file in which its JSON is wrong."""

import json


def line_number(data: bytes, offset: int) -> int:
    """Returns the line that holds a byte, counted from 1."""
    return data.count(b"\n", 0, offset) + 1


def json_error(data: bytes) -> str | None:
    """Returns where and why bytes are no JSON: "line 3, column 7: Expecting ',' delimiter"; None if they are JSON."""
    try:
        json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"line {line_number(data, error.start)}: not UTF-8"
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return "its brackets are nested too deeply"
    return None
