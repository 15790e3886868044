"""Texts of modules without what says how something is called."""

import hashlib
import re

LOCATIONS = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|^#loc.*\n?", re.MULTILINE)
SYMBOLS = re.compile(r'@"[^"]*"|@[\w$.]+|sym_name = "[^"]*"')
VALUES = re.compile(r"%[\w$.-]+")
FUNCTIONS = re.compile(r"(?=^ *(?:tt\.)?func\.?(?:func)? )", re.MULTILINE)


def digest(text: str) -> str:
    """Returns sixteen hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalised(text: str) -> str:
    """Returns a module's text without locations, with symbols and values numbered in the order in which they appear."""
    symbols: dict[str, int] = {}

    def symbol(found: re.Match[str]) -> str:
        name = found[0].removeprefix("sym_name = ").lstrip("@").strip('"')
        return f"@{symbols.setdefault(name, len(symbols))}"

    def with_numbers(function: str) -> str:
        values: dict[str, int] = {}  # each function has its own
        return VALUES.sub(lambda found: f"%{values.setdefault(found[0], len(values))}", function)

    return "".join(map(with_numbers, FUNCTIONS.split(SYMBOLS.sub(symbol, LOCATIONS.sub("", text)))))
