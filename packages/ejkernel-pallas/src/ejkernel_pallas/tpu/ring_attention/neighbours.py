"""How loads of keys move from device to device inside a kernel, and what is collected for them.

Every device has two slots. While its tiles are computed from one of them, that load is copied to the other slot of the
next device, which is free once the device there has said so: it has then worked on the load before, and sent it on.

    copy my own load to slot 0; tell the device before me that I am here, and wait for the one behind me to say so
    for every load:
        wait until it has come                             (not the first, which is my own)
        tell the device before me that my other slot is free
        wait until the next device's other slot is free    (not at first, when it is)
        start copying the load there
        work on it
        with cargo: wait until that of the load has come, and add to it; start copying it to the next device likewise
        wait until the load has been sent

Cargo thus has the time of `work` to arrive, and is one load behind its keys in leaving a device.

A device only ever hears from the one behind it that there is room, and only ever sends to it, so that no message of one
call can be taken for one of another. It is said that a slot is free only once something has come from the device that
hears it: it is in the same kernel by then.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Refs = dict[str, Any]
Work = Callable[[Any, Refs], None]
BEFORE, BEHIND = 0, 1
"""Where the neighbours' indices are: of whom loads come from, and of whom they go to."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """Arrays that move together.

    Attributes:
        axis_name: The mesh axis.
        names: The arrays; `<name>_slots` has the two slots of each.
        kind: What they are, which their semaphores are named by.
    """

    axis_name: str
    names: tuple[str, ...]
    kind: str

    def scratch(self) -> dict[str, Any]:
        """The semaphores: of copies that go, of those that come by slot, of a free slot."""
        count = len(self.names)
        return {
            f"{self.kind}_sent": pltpu.SemaphoreType.DMA((count,)),
            f"{self.kind}_arrived": pltpu.SemaphoreType.DMA((2, count)),
            f"{self.kind}_room": pltpu.SemaphoreType.REGULAR,
        }

    def begin(self, refs: Refs) -> list[Any]:
        """The copies of this device's own to slot 0."""
        return [
            pltpu.make_async_copy(refs[name], refs[f"{name}_slots"].at[0], refs[f"{self.kind}_sent"].at[n])
            for n, name in enumerate(self.names)
        ]

    def copies(self, places: Any, refs: Refs, slot: Any) -> list[Any]:
        """The copies from a slot to the next device, or from the device before: they look alike."""
        return [
            pltpu.make_async_remote_copy(
                src_ref=refs[f"{name}_slots"].at[slot],
                dst_ref=refs[f"{name}_slots"].at[1 - slot],
                send_sem=refs[f"{self.kind}_sent"].at[n],
                recv_sem=refs[f"{self.kind}_arrived"].at[1 - slot, n],
                device_id={self.axis_name: places[BEHIND]},
            )
            for n, name in enumerate(self.names)
        ]

    def at(self, refs: Refs, slot: Any) -> Refs:
        """The arrays in a slot."""
        return {name: refs[f"{name}_slots"].at[slot] for name in self.names}


@dataclasses.dataclass(frozen=True)
class Route:
    """One direction around the ring.

    Attributes:
        count: How many loads a device works on, its own included.
        load: The keys.
        cargo: What is collected for them; without names, nothing.
    """

    count: int
    load: Lane
    cargo: Lane

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What moves."""
        return (self.load, self.cargo) if self.cargo.names else (self.load,)

    def walk(self, places: Any, refs: Refs, work: Work, collect: Work) -> None:
        """Works on one load after another.

        Args:
            places: int32 [2], the indices along the axis of the two neighbours.
            refs: Arrays and slots of all lanes, and scratch memory.
            work: (number of the load, its arrays by name, the cargo's not among them) -> None.
            collect: Likewise with the cargo's, to add to.
        """
        self._enter(places, refs)

        def step(number: Any, carry: None) -> None:
            slot = lax.rem(number, 2)
            more, later = number + 1 < self.count, number > 0
            _when(later, lambda: [copy.wait_recv() for copy in self.load.copies(places, refs, 1 - slot)])
            _when(later & more, lambda: make_room(self.load, places, refs))
            _send(self.load, places, refs, slot, more, later)
            here = self.load.at(refs, slot)
            work(number, here)
            if self.cargo.names:
                _when(later, lambda: _receive(self.cargo, places, refs, slot))
                _when(later & more, lambda: make_room(self.cargo, places, refs))
                collect(number, {**here, **self.cargo.at(refs, slot)})
                _send(self.cargo, places, refs, slot, more, later)
            _when(more, lambda: [copy.wait_send() for copy in self.load.copies(places, refs, slot)])

        lax.fori_loop(0, self.count, step, None)

    def _enter(self, places: Any, refs: Refs) -> None:
        own = [copy for lane in self.lanes for copy in lane.begin(refs)]
        for copy in own:
            copy.start()
        if self.count > 1:
            here = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(here, 1, device_id={self.load.axis_name: places[BEFORE]})
            pl.semaphore_wait(here, 1)
        for copy in own:
            copy.wait()


def make_room(lane: Lane, places: Any, refs: Refs) -> None:
    """Tells the device before this one that the slot is free which this one does not work on."""
    pl.semaphore_signal(refs[f"{lane.kind}_room"], 1, device_id={lane.axis_name: places[BEFORE]})


def await_room(lane: Lane, refs: Refs) -> None:
    """Waits until the next device has a free slot."""
    pl.semaphore_wait(refs[f"{lane.kind}_room"], 1)


def _send(lane: Lane, places: Any, refs: Refs, slot: Any, more: Any, later: Any) -> None:
    """Starts the copies to the next device, once it has room."""
    _when(later & more, lambda: await_room(lane, refs))
    _when(more, lambda: [copy.start() for copy in lane.copies(places, refs, slot)])


def _receive(lane: Lane, places: Any, refs: Refs, slot: Any) -> None:
    """Waits until the cargo before has been sent, whose slot is then free, and this one's has come."""
    for copy in lane.copies(places, refs, 1 - slot):
        copy.wait()


def _when(condition: Any, action: Callable[[], Any]) -> None:
    @pl.when(condition)
    def _() -> None:
        action()
