"""Which chips tests compile their cases for."""

from suite.chips import EVERY, spread

CHIPS = ("a", "b", "c", "d")


def test_every_case_and_every_chip_appear(monkeypatch):
    monkeypatch.delenv(EVERY, raising=False)
    for count in (1, 3, 4, 9):
        pairs = spread(range(count), CHIPS)
        assert {case for case, _ in pairs} == set(range(count))
        assert {chip for _, chip in pairs} == set(CHIPS)
        assert len(pairs) == len(set(pairs)) == max(count, len(CHIPS))


def test_a_chip_that_every_case_is_compiled_for(monkeypatch):
    monkeypatch.delenv(EVERY, raising=False)
    pairs = spread("xy", CHIPS, ["b"])
    assert pairs == [("x", "b"), ("y", "b"), ("x", "a"), ("y", "c"), ("x", "d")]


def test_a_variable_asks_for_every_pair(monkeypatch):
    monkeypatch.setenv(EVERY, "1")
    assert len(spread("xy", CHIPS, ["b"])) == 8


def test_no_cases_or_no_other_chips(monkeypatch):
    monkeypatch.delenv(EVERY, raising=False)
    assert spread("", CHIPS) == []
    assert spread("xy", "b", ["b"]) == [("x", "b"), ("y", "b")]
