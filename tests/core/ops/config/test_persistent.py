"""T-7: no state of the disk breaks an import or a call, and no crash loses what was stored."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import toy as call

from ejkernel.modules import create_default_executor
from ejkernel.ops import (
    BwdParams,
    ConfigKey,
    ConfigSelectorChain,
    FwdParams,
    PersistentCache,
    StoreWarning,
    policy_override,
)
from ejkernel.ops.config.persistent import DIRECTORY_VARIABLE, default_path

KEY = ConfigKey(
    op="toy@1", implementation="plain@1.0", direction="forward", device="cpu", schema="0", call="x=float32[4,8]"
)
PART = FwdParams(q_blocksize=16, kv_blocksize=32)


def test_stored_configs_are_read_back_equal(store):
    PersistentCache(store).put(KEY, PART, 1.0)
    backward = dataclasses.replace(KEY, direction="backward")
    PersistentCache(store).put(backward, BwdParams(num_warps=4), 1.0)

    assert PersistentCache(store).get(KEY, FwdParams) == PART
    assert PersistentCache(store).get(backward, BwdParams) == BwdParams(num_warps=4)
    assert PersistentCache(store).get(dataclasses.replace(KEY, call="other"), FwdParams) is None


def test_an_open_store_sees_what_other_processes_add(store):
    ours, theirs = PersistentCache(store), PersistentCache(store)
    assert ours.get(KEY, FwdParams) is None
    theirs.put(KEY, PART, 1.0)
    assert ours.get(KEY, FwdParams) == PART
    theirs.put(KEY, FwdParams(q_blocksize=32, kv_blocksize=16), 1.0)  # a file of the same size
    assert ours.get(KEY, FwdParams) == FwdParams(q_blocksize=32, kv_blocksize=16)


def test_environment_variables_set_the_path_of_the_user_store(store, monkeypatch, tmp_path):
    assert PersistentCache().path == store
    monkeypatch.delenv("EJKERNEL_PERSISTENT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_path().parent.name == "ejkernel"


def test_the_default_executor_uses_the_path_it_is_given(tmp_path, plain, x):
    for path, file in ((tmp_path / "own.json", "own.json"), (tmp_path / "folder", "folder/configs.json")):
        executor = create_default_executor(path, warmup_iterations=0, timing_iterations=1)
        executor(toy.Toy(), x)

        assert json.loads((tmp_path / file).read_text())["entries"]
    assert not default_path().exists()


GOOD = b'{"entries":{},"format":1}'


def damage(store: Path, content: bytes) -> None:
    store.parent.mkdir(exist_ok=True)
    store.write_bytes(content)


@pytest.mark.parametrize(
    "content", [b"", GOOD[:12], b"\xff\xfe", b'{"entries": {"\xff": 1}, "format": 1}', b"[" * 9999]
)
def test_a_damaged_file_is_set_aside_with_one_warning_and_replaced(plain, x, store, content):
    damage(store, content)
    chain = ConfigSelectorChain(persistent=PersistentCache(store))

    with pytest.warns(StoreWarning) as caught:
        call(x, chain=chain)
    assert len(caught) == 1
    assert "damaged" in str(caught[0].message)
    (aside,) = store.parent.glob("configs.damaged-*.json")
    assert aside.read_bytes() == content

    with policy_override(cache_miss_fallback="autotune"):
        call(x, chain=chain)
    assert len(PersistentCache(store).entries()) == 1


@pytest.mark.parametrize("ask", [lambda cache: cache.entries(), lambda cache: cache.put(KEY, PART, 1.0)])
def test_a_damaged_file_is_moved_under_the_lock(store, monkeypatch, ask):
    """Without it, what another process has just repaired could be moved away."""
    damage(store, b"{")
    replace, moved = os.replace, []

    def checked(source, target):
        with pytest.raises(filelock.Timeout), filelock.FileLock(f"{store}.lock", timeout=0):
            pass
        moved.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    with pytest.warns(StoreWarning, match="damaged"):
        ask(PersistentCache(store))

    assert moved[0] == f"configs.damaged-{os.getpid()}.json"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.integers(0, len(GOOD) - 1).map(lambda n: GOOD[:n])))
@pytest.mark.filterwarnings("ignore::ejkernel.ops.StoreWarning")
def test_arbitrary_store_file_content_breaks_neither_get_nor_put(store, content):
    damage(store, content)
    cache = PersistentCache(store)

    assert cache.get(KEY, FwdParams) is None
    cache.put(KEY, PART, 1.0)
    assert PersistentCache(store).get(KEY, FwdParams) == PART


def test_a_reader_keeps_a_store_file_that_a_writer_just_repaired(store, monkeypatch):
    damage(store, b"{")
    reader, read = PersistentCache(store), Path.read_bytes

    def repaired_after_reading(path):
        content = read(path)
        monkeypatch.setattr(Path, "read_bytes", read)
        with pytest.warns(StoreWarning, match="damaged"):
            PersistentCache(store).put(KEY, PART, 1.0)
        return content

    monkeypatch.setattr(Path, "read_bytes", repaired_after_reading)

    assert reader.get(KEY, FwdParams) == PART
    assert PersistentCache(store).get(KEY, FwdParams) == PART


@pytest.mark.parametrize(
    "entry",
    [
        {"config": {"q_blocksize": "many"}, "seconds": 1.0},
        {"config": {"q_blocksize": -3}, "seconds": 1.0},
        {"config": {"qblocksize": 16}, "seconds": 1.0},
        {"config": 3, "seconds": 1.0},
        "nonsense",
    ],
    ids=str,
)
def test_a_damaged_entry_is_ignored_and_the_others_are_kept(store, entry):
    other = dataclasses.replace(KEY, call="other")
    PersistentCache(store).put(other, PART, 1.0)
    table = json.loads(store.read_text())
    table["entries"][str(KEY)] = entry
    store.write_text(json.dumps(table))
    cache = PersistentCache(store)

    with pytest.warns(StoreWarning, match="a damaged entry is ignored"):
        assert cache.get(KEY, FwdParams) is None
    assert cache.get(other, FwdParams) == PART


@pytest.mark.parametrize("content", [b'"entries":{"key":[1]}', b'"entries":[1]', b'"configurations":{}'])
def test_a_file_of_a_later_version_is_left_as_it_is(store, content):
    damage(store, b'{"format":2,' + content + b"}")
    cache = PersistentCache(store)

    with pytest.warns(StoreWarning, match="format 2") as caught:
        assert cache.get(KEY, FwdParams) is None
    assert len(caught) == 1
    cache.put(KEY, PART, 1.0)  # a second warning would be an error
    assert json.loads(store.read_text())["format"] == 2


def test_a_linked_store_is_written_where_the_link_leads(store, tmp_path):
    PersistentCache(store).put(KEY, PART, 1.0)
    link = tmp_path / "link.json"
    link.symlink_to(store)

    PersistentCache(link).remove([str(KEY)])
    assert link.is_symlink()
    assert not PersistentCache(store).entries()
    assert not link.with_name("link.json.lock").exists()


def test_a_home_of_nobody_is_a_folder_like_others(monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, "~nobody-of-this-name/store")
    assert not PersistentCache().entries()
    assert PersistentCache().predicted.path == Path("~nobody-of-this-name/store/configs.predicted.json")


def no_home(*args, **kwargs):
    raise RuntimeError("could not determine the home directory for '~/.cache'")


@pytest.mark.parametrize("user_cache_path", [no_home, lambda *args, **kwargs: Path("~/.cache/ejkernel")])
def test_a_process_without_a_home_keeps_results_in_memory_with_one_warning(
    plain, x, user_cache_path, tmp_path, monkeypatch
):
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    monkeypatch.setattr("platformdirs.user_cache_path", user_cache_path)
    monkeypatch.chdir(tmp_path)
    chain = ConfigSelectorChain(persistent=PersistentCache())
    call(x, chain=chain)  # a warning would be an error

    with (
        policy_override(cache_miss_fallback="autotune"),
        pytest.warns(StoreWarning, match="no home directory, so set HOME or EJKERNEL_PERSISTENT_CACHE_DIR") as caught,
    ):
        call(x.T, chain=chain)
    assert len(caught) == 1
    assert chain.cache.size() == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("store_at", "argument"),
    [
        (PersistentCache, "opname"),
        (lambda path: PersistentCache(path=Path(path)), "path"),
        (create_default_executor, "persistent_cache_path"),
    ],
    ids=["opname", "path", "executor"],
)
def test_a_path_in_the_home_of_nobody_is_an_error_that_names_the_argument(store_at, argument):
    with pytest.raises(ValueError, match=rf"{argument}: got '~nobody-of-this-name/x', wants the home directory"):
        store_at("~nobody-of-this-name/x")


def test_a_store_that_is_no_path_is_an_error_that_names_the_argument():
    with pytest.raises(ValueError, match="persistent_cache_path: got 3, wants a path or None"):
        create_default_executor(3)


def unusable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file" / "store"  # for root, who may write anywhere but under a file


def read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    return tmp_path / "store"


def folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def unsupported(*args, **kwargs):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", unsupported)
    return tmp_path / "store"


@pytest.mark.parametrize("folder", [unusable_folder, read_only_folder, folder_without_locks])
def test_a_home_that_cannot_be_written_costs_one_warning(plain, x, folder, tmp_path, monkeypatch):
    chain = ConfigSelectorChain(persistent=PersistentCache(folder(tmp_path, monkeypatch)))

    with policy_override(cache_miss_fallback="autotune"):
        with pytest.warns(StoreWarning) as caught:
            call(x, chain=chain)
        call(x.T, chain=chain)  # a second warning would be an error

    assert len(caught) == 1
    assert "in memory only" in str(caught[0].message)
    assert chain.cache.size() == 2


def test_a_store_that_is_a_directory_costs_one_warning(store):
    (store / "inside").mkdir(parents=True)
    cache = PersistentCache(store)

    with pytest.warns(StoreWarning) as caught:
        assert cache.get(KEY, FwdParams) is None
    assert len(caught) == 1
    cache.put(KEY, PART, 1.0)  # a second warning would be an error
    assert cache.entries() == {}


@pytest.mark.parametrize("is_link", [False, True], ids=["itself", "by a link"])
def test_a_pipe_or_device_is_neither_read_nor_replaced(store, is_link, tmp_path):
    """Such as a link to /dev/null, which a process of root could replace for the whole machine."""
    store.parent.mkdir()
    pipe = tmp_path / "pipe.json" if is_link else store
    os.mkfifo(pipe)  # to read it would wait for ever
    if is_link:
        store.symlink_to(pipe)
    cache = PersistentCache(store)

    with pytest.warns(StoreWarning, match="not a regular file"):
        cache.put(KEY, PART, 1.0)
    assert cache.get(KEY, FwdParams) is None
    with pytest.raises(OSError, match="not a regular file"):
        cache.clear()
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_old_store_and_no_temporary_file(store, monkeypatch):
    PersistentCache(store).put(KEY, PART, 1.0)
    before = store.read_bytes()

    def failing(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        PersistentCache(store).put(dataclasses.replace(KEY, call="other"), PART, 1.0)

    assert store.read_bytes() == before
    assert {path.name for path in store.parent.iterdir()} <= {"configs.json", "configs.json.lock"}


KILLED = """
import os, signal, sys
from ejkernel.ops.config.persistent import Entry, PersistentCache
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
PersistentCache(sys.argv[1]).update({"new": Entry({}, 1.0)})
"""


def test_a_killed_writer_leaves_the_old_store_and_its_temporary_file_is_removed_later(store):
    cache = PersistentCache(store)
    cache.put(KEY, PART, 1.0)
    before = store.read_bytes()

    killed = subprocess.run([sys.executable, "-c", KILLED, str(store)], check=False, timeout=600)

    assert killed.returncode == -signal.SIGKILL
    assert store.read_bytes() == before
    assert len(list(store.parent.glob("*.tmp"))) == 1
    cache.put(dataclasses.replace(KEY, call="other"), PART, 1.0)  # the dead one's lock is free
    assert list(store.parent.glob("*.tmp")) == []
    assert len(PersistentCache(store).entries()) == 2


def test_clear_empties_the_store_and_creates_no_folder(store):
    PersistentCache(store).clear()
    assert not store.parent.exists()

    cache = PersistentCache(store)
    cache.put(KEY, PART, 1.0)
    cache.clear()
    assert cache.entries() == {}
