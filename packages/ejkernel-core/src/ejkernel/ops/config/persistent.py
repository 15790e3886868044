"""The persistent tier: measured configurations on disk, safe against crashes and other writers.

One JSON file holds all entries. Writers take a lock, merge with what is there and replace the file atomically, so
readers never see half a file and writers never lose each other's entries. A damaged file is moved aside, under the lock
too: it may have been repaired since it was read.
"""

import contextlib
import glob
import os
import stat
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.config.table import (
    DAMAGED_TABLE_ERRORS,
    Entry,
    StoreWarning,
    Table,
    decode,
    encode,
    entry_config_part,
    table_name,
)

FILE_NAME = "configs.json"
PREDICTED_SUFFIX = ".predicted.json"
DIRECTORY_VARIABLE = "EJKERNEL_PERSISTENT_CACHE_DIR"
LOCK_TIMEOUT_S = 60.0
NO_HOME_PATH = Path(os.devnull, "ejkernel", FILE_NAME)
"""The user's store of a process without a home directory, such as that of a container's arbitrary user id: a path at
which nothing can be read or written."""

# The errors of a file system; filelock raises NotImplementedError on one without locks.
_UNUSABLE_STORE_ERRORS = (OSError, NotImplementedError)

_FileStamp = tuple[int, int, int]


def default_path() -> Path:
    """Returns the user's store: under `EJKERNEL_PERSISTENT_CACHE_DIR`, else in the platform's cache directory.

    Without either, because the process has no home directory, returns `NO_HOME_PATH`.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return _platform_path()
    # `Path.expanduser` raises an error for a user that does not exist.
    folder = Path(os.path.expanduser(directory))
    return folder / FILE_NAME


def _platform_path() -> Path:
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("ejkernel", appauthor=False)
    except RuntimeError:
        return NO_HOME_PATH
    # Earlier versions of platformdirs raise no error.
    return folder / FILE_NAME if folder.is_absolute() else NO_HOME_PATH


def _check_regular_file(path: Path) -> os.stat_result:
    """Returns the status of a file.

    Raises:
        OSError: It is a device, a pipe or a directory, which must not be read or replaced.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    return status


def _is_operation_name(name: str | os.PathLike[str]) -> bool:
    """Returns whether this names an operation and not a file: a text without a directory or an ending."""
    return isinstance(name, str) and Path(name).name == name and not Path(name).suffix and not name.startswith("~")


def expand_store_path(argument: str, path: str | os.PathLike[str] | None) -> Path | None:
    """Returns the path of a store with the home directory for `~`; None for None.

    Args:
        argument: Its name, for the message.
        path: The path.

    Raises:
        ValueError: The path begins with the home directory of a user that does not exist, or it is no path.
    """
    unchecked: Any = path
    if not isinstance(unchecked, str | os.PathLike | None):
        raise ValueError(f"{argument}: got {unchecked!r}, wants a path or None")
    try:
        return None if path is None else Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{argument}: got {str(path)!r}, wants the home directory of a user that exists") from None


class PersistentCache:
    """The user's store. Opens nothing until it is asked.

    If its directory cannot be used, the store warns once with a `StoreWarning`, and then does nothing.

    Args:
        opname: A word without a directory, such as `"flash-attn"`: the store is the file of this name in the directory
            of the user's store. Anything else is `path`.
        path: A `.json` file, or a directory that holds `configs.json`; None for the user's store.
        loader: None: the files have one format.
        dumper: None, as above.
        cfg_type: Changes nothing: entries are read as the types of the kernels that they are of.

    Raises:
        NotImplementedError: `loader` or `dumper` is given.
        ValueError: The path begins with the home directory of a user that does not exist.
    """

    def __init__(
        self,
        opname: str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        loader: None = None,
        dumper: None = None,
        cfg_type: type | None = None,
    ) -> None:
        if loader is not None or dumper is not None:
            raise NotImplementedError("loader, dumper: got a function, wants None; the files have one format")
        argument = "path"
        if path is None and opname is not None:
            argument = "opname"
            path = default_path().with_name(f"{opname}.json") if _is_operation_name(opname) else opname
        self._path = expand_store_path(argument, path)
        self._snapshot: tuple[_FileStamp | None, Mapping[str, Entry]] = (None, {})
        self._readable = self._writable = True

    @property
    def predicted(self) -> "PersistentCache":
        """Returns the store next to this one, which holds predictions instead of measurements."""
        store = PersistentCache()
        store._path = self.path.with_suffix(PREDICTED_SUFFIX)  # a `~` that is left is part of a name
        return store

    @property
    def path(self) -> Path:
        """Returns the path of the file."""
        if self._path is None:
            return default_path()
        return self._path if self._path.suffix == ".json" else self._path / FILE_NAME

    @property
    def _file(self) -> Path:
        """Returns the path without symbolic links: the file is replaced, and all who link to it share its lock."""
        return Path(os.path.realpath(self.path))

    def entries(self) -> Mapping[str, Entry]:
        """Returns all entries now on disk, by key; empty where there is no readable file."""
        if not self._readable:
            return {}
        try:
            status = _check_regular_file(self.path)
            # A replaced file has another inode, even where the clock is too coarse to tell.
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            seen, entries = self._snapshot
            if stamp != seen:
                entries = self._load_entries()
                # In one step: threads must not pair the stamp of one with the content of another.
                self._snapshot = (stamp, entries)
            return entries
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except _UNUSABLE_STORE_ERRORS as error:
            self._readable = False
            self._stop_writing(f"cannot be read ({error})")
            return {}

    def get(self, key: ConfigKey, part: type) -> Any | None:
        """Returns the configuration part stored under `key`, or None."""
        entry = self.entries().get(str(key))
        if entry is not None and entry.predicted and not self.path.name.endswith(PREDICTED_SUFFIX):
            return None  # somebody put files together by hand
        return entry_config_part(entry, part, f"{self.path}, entry {key}")

    def put(
        self,
        key: ConfigKey,
        part: Any,
        seconds: float,
        measured_at: str = "",
        *,
        spread: float = 0.0,
        samples: int = 0,
    ) -> None:
        """Stores one measured part."""
        entry = Entry(msgspec.to_builtins(part), seconds, measured_at, spread=spread, samples=samples)
        self.update({str(key): entry})

    def update(self, entries: Mapping[str, Entry]) -> None:
        """Merges entries into the file under its lock."""
        self._change_entries(lambda stored: {**stored, **entries})

    def remove(self, keys: Iterable[str]) -> None:
        """Takes entries out of the file under its lock; keys that are not there are no error."""
        removed_keys = frozenset(keys)
        self._change_entries(lambda stored: {key: entry for key, entry in stored.items() if key not in removed_keys})

    def _change_entries(self, transform_entries: Callable[[Mapping[str, Entry]], Mapping[str, Entry]]) -> None:
        if not self._writable:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                _check_regular_file(self.path)
            with self._store_lock():
                self._remove_stale_temporaries()
                self._replace_file(encode(Table(transform_entries(self._read_or_set_aside()))))
        except _UNUSABLE_STORE_ERRORS as error:
            self._stop_writing(f"cannot be written ({error})")

    def clear(self) -> None:
        """Removes all entries."""
        if self.path.exists():
            _check_regular_file(self.path)
            with self._store_lock():
                self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _store_lock(self) -> Generator[None]:
        import filelock

        self._file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{self._file}.lock", timeout=LOCK_TIMEOUT_S):
            yield

    def _load_entries(self) -> Mapping[str, Entry]:
        try:
            return decode(self.path.read_bytes())
        except DAMAGED_TABLE_ERRORS:
            with self._store_lock():
                return self._read_or_set_aside()

    def _read_or_set_aside(self) -> Mapping[str, Entry]:
        """Returns the entries on disk, with the lock held. A damaged file is moved away."""
        try:
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except DAMAGED_TABLE_ERRORS as error:
            damaged_path = self._file.with_suffix(f".damaged-{os.getpid()}.json")
            os.replace(self._file, damaged_path)
            warnings.warn(f"{self.path} was damaged ({error}); moved to {damaged_path}", StoreWarning, stacklevel=2)
            return {}

    def _replace_file(self, file_content: bytes) -> None:
        temporary = f"{self._file}.{os.getpid()}.tmp"  # of one writer at a time, for the lock is held
        try:
            with open(temporary, "wb") as file:
                file.write(file_content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _remove_stale_temporaries(self) -> None:
        """Removes what writers that were killed have left."""
        for left in glob.glob(f"{glob.escape(str(self._file))}.*.tmp"):
            os.unlink(left)

    def _stop_writing(self, reason: str) -> None:
        was_unwritable, self._writable = not self._writable, False
        if self.path.parent == NO_HOME_PATH.parent:
            reason = f"cannot be used: there is no home directory, so set HOME or {DIRECTORY_VARIABLE}"
        if not was_unwritable:
            message = f"ejkernel keeps tuned configurations in memory only: {self.path} {reason}"
            warnings.warn(message, StoreWarning, stacklevel=3)


__all__ = ["Entry", "PersistentCache", "StoreWarning", "Table", "default_path", "table_name"]
