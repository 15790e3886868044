"""Suggests what a user may have meant by a name that does not exist."""

import difflib
from collections.abc import Iterable

MOST = 3
MIN_SIMILARITY = 0.6  # of difflib's ratio, in which equal names have 1
MAX_SIMILARITY_GAP = 0.1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: `"; did you mean 'flash_attention'?"`, empty if no known name is similar."""
    similar_names = similar(name, known)
    return f"; did you mean {' or '.join(map(repr, similar_names))}?" if similar_names else ""


def no_such_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns an error message with similar names, or with all of them if none is similar.

    Args:
        kind: What the name is of, such as `"operation"`.
        name: What the user gave.
        known: The names that exist.
    """
    names = sorted(set(known))
    question = did_you_mean(name, names)
    return f"no {kind} {name!r}{question}" if question else f"no {kind} {name!r}; there are {', '.join(names)}"


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Returns at most three known names that contain a name or are spelt like it, the most similar first."""
    typed, names = _spelling_folded(name), sorted(set(known))
    names_containing = [one for one in names if len(typed) > 2 and typed in _spelling_folded(one)]
    if names_containing:
        return sorted(names_containing, key=len)[:MOST]
    ratios = {one: difflib.SequenceMatcher(None, typed, _spelling_folded(one)).ratio() for one in names}
    best = max(ratios.values(), default=0.0)
    similar_names = [one for one in names if ratios[one] >= max(MIN_SIMILARITY, best - MAX_SIMILARITY_GAP)]
    return sorted(similar_names, key=lambda one: -ratios[one])[:MOST]


def _spelling_folded(name: str) -> str:
    """Returns a name without what users confuse: upper case, dashes and spaces."""
    return name.casefold().replace("-", "_").replace(" ", "_")
