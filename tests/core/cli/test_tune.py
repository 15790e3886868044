"""`ejkernel tune` and `ejkernel cache`."""

import json
import os
import subprocess
import sys

import pytest

from ejkernel.ops.config.persistent import PersistentCache

SMALL = ("flash_attention", "--shape", "1,64,2,16", "--repeat", "1")
FLEET = """
import dataclasses
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS

@hookimpl
def ejkernel_implementations():
    return [dataclasses.replace(IMPLEMENTATIONS[0], name="fleet", priority=5, package="fleet_backend")]
"""
ASK = """
import jax, ejkernel
x = jax.ShapeDtypeStruct((1, 600, 2, 16), "float32")
forward = ejkernel.explain("flash_attention", x, x, x).forward
print(forward.implementation.name, forward.tier, forward.trail[-1], forward.config.block_q, sep="|")
"""


def test_tuning_measures_both_directions_and_fills_the_store(run, store):
    output = run("tune", *SMALL).output
    assert "flash_attention, forward, xla on cpu" in output
    assert "flash_attention, backward, xla on cpu" in output
    assert "heuristic" in output
    directions = [key.split(" | ")[2] for key in json.loads(store.read_text())["entries"]]
    assert sorted(directions) == ["backward", "forward"]
    assert "Configuration from persistent" in run("explain", *SMALL[:3]).output


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction_can_be_tuned_alone(run, store, direction):
    run("tune", *SMALL, "--direction", direction)
    (key,) = json.loads(store.read_text())["entries"]
    assert key.split(" | ")[2] == direction


def test_another_store_can_be_named(run, store, tmp_path):
    run("tune", *SMALL, "--direction", "forward", "--store", str(tmp_path / "fleet.json"))
    assert not store.exists()
    assert len(PersistentCache(tmp_path / "fleet.json").entries()) == 1
    assert "block_q=" in run("cache", "list", "--store", str(tmp_path / "fleet.json")).output


def test_nothing_to_tune_is_an_error_with_the_reasons(run):
    output = run("tune", *SMALL, "--platform", "triton", status=1).output
    assert "platform='triton' was asked for" in output
    assert "no implementation supports the forward pass" in output


def test_a_store_that_cannot_be_written_is_an_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        output = run("tune", *SMALL, "--direction", "forward", "--store", str(tmp_path / "file" / "s"), status=1).output
    assert "could not be stored" in output


def test_an_exported_table_is_found_where_a_backend_ships_it(run, install, tmp_path):
    """The whole way of a fleet: tune, export into a package, and let another process with no store find it."""
    site = install("fleet_backend", FLEET)
    tuned = site / "fleet_backend" / "tuned"
    mine = ("--store", str(tmp_path / "mine.json"))
    run("tune", "flash_attention", "--shape", "1,600,2,16", "--repeat", "1", *mine, "--export", str(tuned))
    entries = json.loads((tuned / "cpu" / "flash_attention.json").read_text())["entries"]
    # Not what the heuristics say, so that it must have come from the table.
    for entry in entries.values():
        entry["config"] = {"block_q": 40, "block_kv": 40}
    (tuned / "cpu" / "flash_attention.json").write_text(json.dumps({"entries": entries}))
    fresh = {**os.environ, "PYTHONPATH": str(site), "EJKERNEL_PERSISTENT_CACHE_DIR": str(tmp_path / "empty")}
    asked = subprocess.run([sys.executable, "-c", ASK], env=fresh, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "fleet|persistent|persistent: shipped table|40"


def test_exported_tables_merge_and_hold_what_was_measured(run, tmp_path):
    for length in ("32", "64"):
        shape = ("--shape", f"1,{length},2,16", "--repeat", "1", "--direction", "forward")
        run("tune", "flash_attention", *shape, "--export", str(tmp_path))
    entries = json.loads((tmp_path / "cpu" / "flash_attention.json").read_text())["entries"]
    assert len(entries) == 2
    for key, entry in entries.items():
        assert key.endswith(" | shipped")
        assert "xla@" not in key  # a table ships in a package, which has one version
        assert entry["seconds"] > 0
        assert None not in entry["config"].values()
    assert sorted(os.listdir(tmp_path / "cpu")) == ["flash_attention.json"]


def test_a_table_that_is_damaged_is_left_alone(run, tmp_path):
    path = tmp_path / "cpu" / "flash_attention.json"
    path.parent.mkdir()
    path.write_text("<<<<<<< HEAD")
    output = run("tune", *SMALL, "--direction", "forward", "--export", str(tmp_path), status=1).output
    assert "is not a table of configurations" in output
    assert path.read_text() == "<<<<<<< HEAD"


def test_the_store_is_shown_and_cleared_after_asking(run, store):
    assert run("cache", "path").output.strip() == str(store)
    assert f"no entries in {store}" in run("cache", "list").output
    run("tune", *SMALL, "--direction", "forward")
    listed = run("cache", "list").output
    assert "query=float32[1,64,2,16]" in listed
    assert "block_q=64" in listed
    assert "Aborted" in run("cache", "clear", answer="n\n", status=1).output
    assert len(PersistentCache(store).entries()) == 1
    assert "removed 1" in run("cache", "clear", answer="y\n").output
    assert not PersistentCache(store).entries()
    assert "no entries" in run("cache", "clear", "--yes").output


def test_entries_of_other_versions_are_listed_as_they_are(run, store):
    store.parent.mkdir()
    store.write_text('{"entries": {"a key of tomorrow": {"config": {"tile": 8}, "seconds": 0.5}}, "format": 1}')
    listed = run("cache", "list").output
    assert "a key of tomorrow" in listed
    assert "tile=8" in listed
    assert "removed 1" in run("cache", "clear", "--yes").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,64,2,16"), "give the operation, OP, that the options describe"),
        (("flash_attention", "--dtype", "bfloat16"), "--calls has its own shapes, options and platforms"),
        (("flash_attention", "--platform", "xla"), "--calls has its own shapes, options and platforms"),
    ],
)
def test_options_of_a_call_next_to_a_file_of_calls_are_refused(run, tmp_path, arguments, message):
    (tmp_path / "calls.json").touch()
    assert message in run("tune", "--calls", str(tmp_path / "calls.json"), *arguments, status=2).output
