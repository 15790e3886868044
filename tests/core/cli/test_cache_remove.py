"""`ejkernel cache remove` deletes only what its options describe, and nothing if one of them is wrong."""

import datetime

import pytest

from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import Entry

OLD = "flash_attention@1 | xla@0.2.0 | forward | cpu | 00000000 | query=float32[1,8,1,8] | 0.2.0"
NEW = OLD.replace("forward", "backward")
TIMELESS = OLD.replace("cpu", "NVIDIA H200")


@pytest.fixture
def filled(store):
    now = datetime.datetime.now(datetime.UTC)
    entries = {
        OLD: Entry({"block_q": 64}, 1e-3, (now - datetime.timedelta(days=30)).isoformat(timespec="seconds")),
        NEW: Entry({"block_q": 64}, 1e-3, now.isoformat(timespec="seconds")),
        TIMELESS: Entry({"block_q": 64}, 1e-3),
    }
    PersistentCache(store).update(entries)
    return PersistentCache(store)


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "7", "-7d", "7 days", "", "20.11.2026", "z"])
@pytest.mark.parametrize("command", [("remove", "--yes"), ("export", "table.json")], ids=" ".join)
def test_what_is_no_date_is_refused_and_nothing_is_removed(run, filled, text, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run("cache", *command, f"--before={text}", status=2).output
    assert f"got {text!r}, wants an ISO 8601 date or time in UTC" in output
    assert set(filled.entries()) == {OLD, NEW, TIMELESS}
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize("text", ["7d", "2w", "100h"])
def test_an_age_selects_older_entries_and_never_those_without_a_time(run, filled, text):
    assert "removed 1 " in run("cache", "remove", "--yes", "--before", text).output
    assert set(filled.entries()) == {NEW, TIMELESS}


def test_times_are_compared_as_times_and_not_as_text(run, filled):
    later = datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=-12))) - datetime.timedelta(hours=1)
    # West of Greenwich the date may still be yesterday's; as text it would be smaller than the entry's.
    PersistentCache(filled.path).update({OLD: Entry({"block_q": 64}, 1e-3, later.isoformat(timespec="seconds"))})
    assert "no such entries" in run("cache", "remove", "--yes", "--before", "2h").output


@pytest.mark.parametrize(
    ("option", "value", "answer"),
    [
        ("--op", "flash_atention", "no operation 'flash_atention'; did you mean 'flash_attention'?"),
        ("--implementation", "tritn", "no implementation 'tritn'; did you mean 'triton'?"),
    ],
)
def test_a_misspelt_name_is_an_error(run, filled, option, value, answer):
    assert answer in run("cache", "remove", "--yes", option, value, status=2).output
    assert len(filled.entries()) == 3


def test_what_will_go_is_shown_before_the_question(run, filled):
    output = run("cache", "remove", "--before", "7d", answer="n\n", status=1).output
    assert "1 of 3 entries" in output
    assert output.index("flash_attention@1") < output.index("Remove 1 ")
    assert "forward" in output
    assert "backward" not in output
    assert len(filled.entries()) == 3


def test_declining_the_confirmation_removes_nothing(run, filled):
    run("cache", "remove", "--before", "7d", answer="", status=1)
    assert len(filled.entries()) == 3


def test_merging_keeps_the_later_measurement_whatever_its_time_zone(run, tmp_path):
    early, late = tmp_path / "early.json", tmp_path / "late.json"
    PersistentCache(early).update({OLD: Entry({"block_q": 1}, 1e-3, "2026-11-20T10:00:00+00:00")})
    PersistentCache(late).update({OLD: Entry({"block_q": 2}, 1e-3, "2026-11-20T06:00:00-12:00")})
    run("cache", "merge", str(tmp_path / "merged.json"), str(early), str(late))
    assert PersistentCache(tmp_path / "merged.json").entries()[OLD].config == {"block_q": 2}
