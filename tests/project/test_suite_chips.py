"""Which chips tests compile their cases for."""

from suite.chips import EVERY_CHIP_VARIABLE, pair_cases_with_chips

CHIPS = ("a", "b", "c", "d")


def test_every_case_and_every_chip_appear(monkeypatch):
    monkeypatch.delenv(EVERY_CHIP_VARIABLE, raising=False)
    for count in (1, 3, 4, 9):
        pairs = pair_cases_with_chips(range(count), CHIPS)
        assert {case for case, _ in pairs} == set(range(count))
        assert {chip for _, chip in pairs} == set(CHIPS)
        assert len(pairs) == len(set(pairs)) == max(count, len(CHIPS))


def test_every_case_is_paired_with_each_chip_for_every_case(monkeypatch):
    monkeypatch.delenv(EVERY_CHIP_VARIABLE, raising=False)
    pairs = pair_cases_with_chips("xy", CHIPS, ["b"])
    assert pairs == [("x", "b"), ("y", "b"), ("x", "a"), ("y", "c"), ("x", "d")]


def test_an_environment_variable_selects_every_pair(monkeypatch):
    monkeypatch.setenv(EVERY_CHIP_VARIABLE, "1")
    assert len(pair_cases_with_chips("xy", CHIPS, ["b"])) == 8


def test_pairs_without_cases_or_without_other_chips(monkeypatch):
    monkeypatch.delenv(EVERY_CHIP_VARIABLE, raising=False)
    assert pair_cases_with_chips("", CHIPS) == []
    assert pair_cases_with_chips("xy", "b", ["b"]) == [("x", "b"), ("y", "b")]
