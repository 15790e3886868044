"""Where `tune` and `cache import` put what they have, and what they leave alone."""

import json
import os

import pytest

from ejkernel.cli import tune
from ejkernel.cli.ops import splittable_axes
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import Entry
from ejkernel.ops.plugins import registry

KEY = "flash_attention@1 | xla@0.2.0 | forward | cpu | 0badcafe | x=float32[4] | 0.2.0"
SMALL = ("flash_attention", "--shape", "1,64,2,16")


def entry(block):
    return Entry({"block_q": block}, 1.0, "2026-11-20T10:00:00+00:00")


@pytest.mark.parametrize(("target", "predicted"), [((), False), (("--target", "v5e"), True)])
def test_predictions_are_stored_apart_from_measurements(run, store, monkeypatch, target, predicted):
    used = []
    monkeypatch.setattr(
        tune, "_tune_call", lambda call, settings, *stores_and_output: used.append(stores_and_output) or []
    )
    run("tune", *SMALL, *target)
    ((measured, results, _),) = used
    assert (results is measured) != predicted
    assert results.path == (measured.predicted.path if predicted else store)


def test_an_imported_entry_of_the_same_time_replaces_none(run, store, tmp_path):
    PersistentCache(store).update({KEY: entry(8)})
    PersistentCache(tmp_path / "other.json").update({KEY: entry(16)})
    assert "imported 0 entries" in run("cache", "import", str(tmp_path / "other.json")).output
    assert PersistentCache(store).entries()[KEY].config == {"block_q": 8}


def test_axes_that_no_device_may_split_are_not_listed():
    ops = registry().ops
    assert splittable_axes(ops["flash_attention"]) == ["b", "t", "h", "g"]
    assert "k" not in splittable_axes(ops["grouped_matmul"])


def test_a_store_in_the_home_of_nobody_is_a_wrong_option(run):
    result = run("cache", "path", "--store", "~nobody-of-this-name/x", status=2)
    assert "--store: got '~nobody-of-this-name/x', wants the home directory of a user that exists" in result.output


def test_exports_replace_no_pipe_and_keep_links(run, store, tmp_path):
    PersistentCache(store).update({KEY: entry(8)})
    pipe, link = tmp_path / "pipe", tmp_path / "link.json"
    os.mkfifo(pipe)
    assert "it is not a regular file" in run("cache", "export", str(pipe), status=1).output
    assert pipe.is_fifo()

    link.symlink_to(tmp_path / "table.json")
    run("cache", "export", str(link))
    assert link.is_symlink()
    assert PersistentCache(tmp_path / "table.json").entries()


@pytest.mark.parametrize("columns", ["", "wide", "0", "-5"])
def test_tables_have_no_limit_where_columns_is_no_width(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    PersistentCache().update({KEY: entry(8)})
    assert "measured" in run("cache", "list").output


def test_doctor_knows_a_store_that_no_folder_can_hold(run, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "file"))
    assert not json.loads(run("doctor", "--json").stdout)["store"]["writable"]
