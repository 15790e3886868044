"""A fleet's way: calls recorded by an application are tuned elsewhere, and the store's entries travel in files."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import flash_attention
from ejkernel.ops import clear_recorded, record_calls, save_recorded
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import Entry

QUICK = ("--repeat", "1", "--direction", "forward")
KEY = "{op}@1 | xla@0.2.0 | forward | {device} | 0badcafe | x=float32[4] | 0.2.0"
CPU, TPU = KEY.format(op="flash_attention", device="cpu"), KEY.format(op="grouped_matmul", device="TPU v5e")


def entry(seconds=1.0, when="2026-11-20T10:00:00+00:00", predicted=False):
    return Entry({"block_q": 8}, seconds, when, predicted=predicted)


@pytest.fixture(autouse=True)
def nothing_recorded():
    clear_recorded()
    yield
    clear_recorded()


@pytest.fixture
def filled(store):
    opened = PersistentCache(store)
    opened.update({CPU: entry()})
    opened.predicted.update({TPU: entry(predicted=True)})
    return opened


def test_calls_recorded_by_an_application_are_tuned_from_a_file(run, store, tmp_path):
    arrays = [jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32) for length in (32, 64)]
    with record_calls():
        for x in arrays:
            jax.eval_shape(lambda x: flash_attention(x, x, x, causal=True), x)
    save_recorded(tmp_path / "calls.json")
    shown = run("tune", "--calls", str(tmp_path / "calls.json"), *QUICK).output
    assert "2 of 2: flash_attention, query float32[1,64,2,16]" in shown
    assert len(PersistentCache(store).entries()) == 2
    for length in ("32", "64"):
        given = ("--shape", f"1,{length},2,16", "-o", "causal=true")
        assert "Configuration from persistent" in run("explain", "flash_attention", *given).output


def test_a_sharded_call_is_tuned_as_one_shard(run, store, tmp_path):
    mesh, split = Mesh(jax.devices()[:2], ("data",)), PartitionSpec("data")
    x = jnp.ones((4, 16, 2, 16))
    with record_calls():
        call = {"mesh": mesh, "in_specs": (split, split, split), "out_specs": split}
        jax.eval_shape(lambda x: flash_attention(x, x, x, **call), x)
    save_recorded(tmp_path / "calls.json")
    run("tune", "--calls", str(tmp_path / "calls.json"), *QUICK)
    (key,) = PersistentCache(store).entries()
    assert "query=float32[2,16,2,16]" in key


def test_one_call_that_cannot_be_tuned_does_not_stop_the_others(run, store, tmp_path):
    shapes = {name: "1,16,2,16:float32" for name in ("query", "key", "value")}
    calls = [{"op": "flash_attention", "platform": platform, "arguments": shapes} for platform in ("triton", "xla")]
    (tmp_path / "calls.json").write_text(json.dumps({"calls": calls}))
    shown = run("tune", "--calls", str(tmp_path / "calls.json"), *QUICK, "--json", status=1)
    found = json.loads(shown.stdout)
    assert [failure["call"].startswith("flash_attention, query") for failure in found["failed"]] == [True]
    assert [result["implementation"] for result in found["results"]] == ["xla"]


def test_a_file_of_calls_and_a_shape_exclude_each_other(run, tmp_path):
    (tmp_path / "calls.json").write_text('{"calls": []}')
    file = ("--calls", str(tmp_path / "calls.json"))
    assert (
        "use either --calls or the others"
        in run("tune", "flash_attention", "--shape", "1,16,2,16", *file, status=2).output
    )
    assert "has no calls" in run("tune", *file, status=2).output
    assert "give the operation, OP, or --calls" in run("tune", status=2).output


def test_exported_entries_are_imported_with_predictions_kept_apart(run, filled, tmp_path):
    file, other = tmp_path / "fleet.json", tmp_path / "other"
    assert "exported 2" in run("cache", "export", str(file)).output
    assert "imported 2" in run("cache", "import", str(file), "--store", str(other)).output
    there = PersistentCache(other)
    assert set(there.entries()) == {CPU}
    assert set(there.predicted.entries()) == {TPU}
    assert "imported 0" in run("cache", "import", str(file), "--store", str(other)).output


def test_an_export_can_be_of_one_device(run, filled, tmp_path):
    run("cache", "export", str(tmp_path / "cpu.json"), "--device", "cpu")
    assert set(json.loads((tmp_path / "cpu.json").read_text())["entries"]) == {CPU}
    assert "no such entries" in run("cache", "export", str(tmp_path / "no.json"), "--device", "abacus", status=1).output


def test_of_two_measurements_the_later_stays_and_none_yields_to_a_prediction(run, tmp_path):
    old, new, guess = (tmp_path / f"{name}.json" for name in ("old", "new", "guess"))
    PersistentCache(old).update({CPU: entry(1.0, "2026-01-01")})
    PersistentCache(new).update({CPU: entry(2.0, "2026-02-01")})
    PersistentCache(guess).update({CPU: entry(3.0, "2026-03-01", predicted=True)})
    for number, files in enumerate([(old, new, guess), (guess, new, old)]):
        merged = tmp_path / f"merged{number}.json"
        assert "1 entry in" in run("cache", "merge", str(merged), *map(str, files)).output
        assert PersistentCache(merged).entries()[CPU].seconds == 2.0


def test_some_entries_can_be_removed(run, filled):
    assert "give at least one of --op" in run("cache", "remove", status=2).output
    assert "no such entries" in run("cache", "remove", "--op", "mean_pooling").output
    assert "Aborted" in run("cache", "remove", "--op", "flash_attention", answer="n\n", status=1).output
    assert "removed 1" in run("cache", "remove", "--predicted", "--yes").output
    assert not filled.predicted.entries()
    assert set(filled.entries()) == {CPU}
    assert "removed 1" in run("cache", "remove", "--before", "2026-11-21", "--yes").output
    assert not filled.entries()


def test_the_list_says_what_was_predicted(run, filled):
    listed = json.loads(run("cache", "list", "--json").stdout)["entries"]
    assert [(one["operation"], one["predicted"]) for one in listed] == [
        ("flash_attention@1", False),
        ("grouped_matmul@1", True),
    ]
    assert run("cache", "list").output.count("predicted") == 1


def test_a_file_that_is_no_table_is_an_error(run, tmp_path):
    (tmp_path / "notes.json").write_text("notes")
    for command in (("import",), ("merge", str(tmp_path / "out.json"))):
        assert "is not a table" in run("cache", *command, str(tmp_path / "notes.json"), status=1).output
