"""A model of warpgroups: threads with mbarriers, asynchronous copies and named barriers, on NumPy arrays.

One thread runs at a time, until it waits. Then a random one that need not wait goes on, or a random copy is done. The
model fails if all wait and no copy is under way (the kernel would hang), if an mbarrier gets too many arrivals, if an
index is out of bounds, and if a copy or half a phase is left at the end.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np


class Window(NamedTuple):
    """Stands for `pl.ds`."""

    start: int
    size: int


class Ref:
    """A window of an array in device or shared memory. An axis with an integer index is dropped."""

    def __init__(self, array: np.ndarray, axes: Any = None, order: Any = None):
        self.array = array
        self.axes = [Window(0, n) for n in array.shape] if axes is None else axes
        self.order = order  # of the axes that are left
        self.at = _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [x.size for x in self.axes if isinstance(x, Window)]
        return tuple(sizes if self.order is None else [sizes[n] for n in self.order])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _indices(self, clips: bool) -> tuple[Any, Any]:
        """Returns the index along each axis, and which of them are in bounds."""
        index = [np.arange(x.start, x.start + x.size) if isinstance(x, Window) else np.array([x]) for x in self.axes]
        inside = [x < n for x, n in zip(index, self.array.shape, strict=True)]
        assert all(x[0] >= 0 for x in index), "out of bounds"
        assert clips or all(x.all() for x in inside), "out of bounds"
        return index, inside

    def transpose(self, order: tuple[int, ...]) -> "Ref":
        return Ref(self.array, self.axes, order)

    def read(self, clips: bool = False) -> np.ndarray:
        """Returns the elements; with `clips`, as TMA reads device memory, zeros past the end of an axis."""
        index, inside = self._indices(clips)
        values = np.zeros([len(x) for x in index], self.array.dtype)
        values[np.ix_(*inside)] = self.array[np.ix_(*(x[y] for x, y in zip(index, inside, strict=True)))]
        values = values.reshape([x.size for x in self.axes if isinstance(x, Window)])
        return values if self.order is None else values.transpose(self.order)

    def write(self, values: Any, clips: bool = False) -> None:
        """Stores elements; with `clips`, as TMA writes device memory, only those in bounds."""
        index, inside = self._indices(clips)
        values = np.broadcast_to(values, self.shape)
        values = values if self.order is None else values.transpose(np.argsort(self.order))
        values = values.reshape([len(x) for x in index])[np.ix_(*inside)]
        self.array[np.ix_(*(x[y] for x, y in zip(index, inside, strict=True)))] = values

    def __getitem__(self, index: Any) -> Any:
        return (self if index is Ellipsis else self.at[index]).read()[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        (self if index is Ellipsis else self.at[index]).write(value)


class _At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, index: Any) -> Ref:
        index = list(index) if isinstance(index, tuple) and not isinstance(index, Window) else [index]
        assert self.ref.order is None
        axes = []
        for axis in self.ref.axes:
            selected = index.pop(0) if isinstance(axis, Window) and index else slice(None)
            if isinstance(selected, Window):
                axes.append(Window(axis.start + int(selected.start), selected.size))
            else:
                axes.append(axis if isinstance(selected, slice) else axis.start + int(selected))
        return Ref(self.ref.array, axes)


class Mbarriers:
    """Mbarriers of one name: a phase ends with the last arrival, once all copies that count towards it are done."""

    def __init__(self, name: str, num_arrivals: int, num_barriers: int = 1):
        self.name, self.num_arrivals, self.num_barriers = name, num_arrivals, num_barriers
        self.phases, self.arrivals, self.copies = ([0] * num_barriers for _ in range(3))
        self.waits: dict[Any, list[int]] = {}
        self.at = self

    def __getitem__(self, n: Any) -> tuple["Mbarriers", int]:
        assert 0 <= n < self.num_barriers, "out of bounds"
        return self, int(n)

    def arrive(self, n: int, copies: int = 0) -> None:
        self.arrivals[n] += 1
        self.copies[n] += copies
        assert self.arrivals[n] <= self.num_arrivals, f"too many arrivals at {self.name}"
        self.end_phase(n)

    def end_phase(self, n: int) -> None:
        if self.arrivals[n] == self.num_arrivals and not self.copies[n]:
            self.arrivals[n], self.phases[n] = 0, self.phases[n] + 1

    def start_wait(self, n: int, who: Any) -> Any:
        """Returns whether the wait is over: if the parity of the current phase is not that of the awaited one."""
        waits = self.waits.setdefault(who, [0] * self.num_barriers)
        waits[n] += 1
        awaited = waits[n] - 1
        return lambda: self.phases[n] % 2 != awaited % 2


class StoppedError(Exception):
    """Ends a thread after another one has failed, or if all wait."""


class Simulation:
    """Threads, of which one runs at a time, and copies under way.

    Attributes:
        copies: Who waits for a copy, and what the copy does when it is done.
        threads: The event that lets a thread run, and whether its wait is over, by its name.
        control: Set if no thread runs.
        errors: What ended a thread.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.copies: list[tuple[Any, Any]] = []
        self.local = threading.local()
        self.threads: dict[Any, list[Any]] = {}
        self.control = threading.Event()
        self.is_stopped = False
        self.errors: list[Exception] = []

    def run(self, bodies: dict[Any, Any]) -> None:
        """Runs a function per thread, by the names of the threads."""
        self.threads = {name: [threading.Event(), lambda: True] for name in bodies}
        with ThreadPoolExecutor(len(bodies)) as pool:
            for name, body in bodies.items():
                pool.submit(self._run_thread, name, body)
            try:
                while self.threads and not self.errors:
                    self._run_a_thread_or_copy()
            finally:
                self.is_stopped = True
                for event, _ in list(self.threads.values()):
                    event.set()
        if self.errors:
            raise self.errors[0]
        assert not self.copies, "copies are under way at the end"

    def _run_a_thread_or_copy(self) -> None:
        choices = [name for name, (_, is_over) in self.threads.items() if is_over()] + [None] * len(self.copies)
        assert choices, f"all wait: {sorted(map(str, self.threads))}"
        name = self.random.choice(choices)
        if name is None:
            self.copies.pop(self.random.randrange(len(self.copies)))[1]()
            return
        self.control.clear()
        self.threads[name][0].set()
        self.control.wait()

    def _run_thread(self, name: Any, body: Any) -> None:
        self.local.name = name
        try:
            self._wait_for_turn()
            body()
        except StoppedError:
            return
        except Exception as error:  # noqa: BLE001  # raised again by `run`
            self.errors.append(error)
        del self.threads[name]
        self.control.set()

    def _wait_for_turn(self) -> None:
        event, _ = self.threads[self.local.name]
        event.wait()
        event.clear()
        if self.is_stopped:
            raise StoppedError

    def wait(self, is_over: Any) -> None:
        """Lets others run until `is_over()`."""
        self.threads[self.local.name][1] = is_over
        self.control.set()
        self._wait_for_turn()
        self.threads[self.local.name][1] = lambda: True
