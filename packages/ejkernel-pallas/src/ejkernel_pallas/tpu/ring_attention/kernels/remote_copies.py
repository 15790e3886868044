"""Send and receive of keys inside a ring kernel, and of the gradients (cargo) that are collected for them.

Every device has two slots (double buffering). While its tiles are computed from one of them, that load is copied to
the other slot of the next device, once that device has signalled that the slot is free: it has then computed with the
load before, and sent it.

    device i       slot 0: compute load n   │ slot 1: compute load n+1 │ ...
                        └─── remote copy ────────► device i+1, slot 1
                        ◄── "slot 1 is free" ───── device i+1, after its own send from slot 1

    copy my own load to slot 0; tell the device before me that I am here, and wait for the next one to say so
    for every load:
        wait until it has come                             (not the first, which is my own)
        tell the device before me that my other slot is free
        wait until the next device's other slot is free    (not at first, when it is)
        start copying the load there
        work on it
        with cargo: wait until that of the load has come, and add to it; start copying it to the next device likewise
        wait until the load has been sent

Cargo thus has the time of `work` to arrive, and leaves a device one load after its keys.

Hazard: semaphores are shared by consecutive kernels. A device receives slot signals only from the device that it sends
to, and a slot is signalled free only after a load has come from the device that gets the signal, which thus is in the
same kernel by then. So no signal of one call reaches another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref

Arrays = dict[str, Ref]
"""Arrays of a load, or of its cargo, by name."""
Work = Callable[[Any, Arrays], None]
PREVIOUS, NEXT = 0, 1
"""Where the neighbours' indices are: the device that loads come from, and the device that they go to."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """Arrays that move together.

    Attributes:
        axis_name: The mesh axis.
        names: The arrays; `<name>_slots` has the two slots of each.
        kind: What they are, `"load"` or `"cargo"`, which their semaphores are named by.
    """

    axis_name: str
    names: tuple[str, ...]
    kind: str

    def scratch(self) -> dict[str, Any]:
        """Returns the semaphores: of sends, of receives by slot, of a free slot."""
        count = len(self.names)
        return {
            f"{self.kind}_sent": pltpu.SemaphoreType.DMA((count,)),
            f"{self.kind}_arrived": pltpu.SemaphoreType.DMA((2, count)),
            f"{self.kind}_slot_free": pltpu.SemaphoreType.REGULAR,
        }

    def bind(self, named: dict[str, Any], neighbours: Ref) -> "ChannelRefs":
        """Returns the refs of this lane, of which slots and semaphores are taken out of `named`."""
        return ChannelRefs(
            lane=self,
            neighbours=neighbours,
            local=tuple(named[name] for name in self.names),
            slots=tuple(named.pop(f"{name}_slots") for name in self.names),
            sent=named.pop(f"{self.kind}_sent"),
            arrived=named.pop(f"{self.kind}_arrived"),
            slot_free=named.pop(f"{self.kind}_slot_free"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelRefs:
    """A lane in a kernel.

    Attributes:
        lane: What moves.
        neighbours: int32 [2] in scalar memory, the indices along the axis of the two neighbours.
        local: The device's own arrays, in HBM.
        slots: Of each array [2, ...], in HBM.
        sent: DMA semaphores of sends, one an array.
        arrived: DMA semaphores of receives, [2, arrays].
        slot_free: Counts the free slots of the next device.
    """

    lane: Channel
    neighbours: Ref
    local: tuple[Ref, ...]
    slots: tuple[Ref, ...]
    sent: Ref
    arrived: Ref
    slot_free: Ref

    def local_copies(self) -> list[Any]:
        """Returns the copies of this device's own arrays to slot 0."""
        pairs = enumerate(zip(self.local, self.slots, strict=True))
        return [pltpu.make_async_copy(local, slots.at[0], self.sent.at[n]) for n, (local, slots) in pairs]

    def copies(self, slot: Any) -> list[Any]:
        """Returns the copies from a slot to the next device, or from the device before: they look alike."""
        return [
            pltpu.make_async_remote_copy(
                src_ref=slots.at[slot],
                dst_ref=slots.at[1 - slot],
                send_sem=self.sent.at[n],
                recv_sem=self.arrived.at[1 - slot, n],
                device_id={self.lane.axis_name: self.neighbours[NEXT]},
            )
            for n, slots in enumerate(self.slots)
        ]

    def at(self, slot: Any) -> Arrays:
        """Returns the arrays in a slot."""
        return {name: slots.at[slot] for name, slots in zip(self.lane.names, self.slots, strict=True)}


@dataclasses.dataclass(frozen=True)
class Route:
    """One direction around the ring.

    Attributes:
        count: How many loads a device works on, its own included.
        load: The keys.
        cargo: What is collected for them; without names, nothing.
    """

    count: int
    load: Channel
    cargo: Channel

    def scratch(self) -> dict[str, Any]:
        """Returns the semaphores of all that moves."""
        return self.load.scratch() | (self.cargo.scratch() if self.cargo.names else {})

    def for_each_load(self, load: ChannelRefs, cargo: ChannelRefs | None, work: Work, collect: Work) -> None:
        """Works on one load after another.

        Args:
            load: The keys.
            cargo: What is collected for them; None where nothing is.
            work: (number of the load, its arrays by name, the cargo's not among them) -> None.
            collect: Likewise with the cargo's, to add to.
        """
        self._enter_barrier([load] if cargo is None else [load, cargo])

        def step(number: Any, carry: None) -> None:
            slot = lax.rem(number, 2)
            more, later = number + 1 < self.count, number > 0
            # Copies look alike from both ends: the receiving semaphore is that of the slot that the load comes to.
            _when(later, lambda: [copy.wait_recv() for copy in load.copies(1 - slot)])
            _when(later & more, lambda: signal_free_slot(load))
            _send(load, slot, more, later)
            here = load.at(slot)
            # While the load is on its way to the next device: both only read it.
            work(number, here)
            if cargo is not None:
                _when(later, functools.partial(_receive, cargo, slot))
                _when(later & more, functools.partial(signal_free_slot, cargo))
                collect(number, {**here, **cargo.at(slot)})
                _send(cargo, slot, more, later)
            # Hazard: the previous device writes this slot next, so the send from it must have finished.
            _when(more, lambda: [copy.wait_send() for copy in load.copies(slot)])

        lax.fori_loop(0, self.count, step, None)

    def _enter_barrier(self, lanes: list[ChannelRefs]) -> None:
        """Copies the device's own arrays to slot 0, and waits until the next device is in this kernel too."""
        local = [copy for lane in lanes for copy in lane.local_copies()]
        for copy in local:
            copy.start()
        if self.count > 1:
            # A remote copy may only start when its target runs this kernel, and its memory is this kernel's.
            here = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(here, 1, device_id={self.load.axis_name: lanes[0].neighbours[PREVIOUS]})
            pl.semaphore_wait(here, 1)
        for copy in local:
            copy.wait()


def signal_free_slot(refs: ChannelRefs) -> None:
    """Tells the device before this one that the slot is free which this one does not work on."""
    pl.semaphore_signal(refs.slot_free, 1, device_id={refs.lane.axis_name: refs.neighbours[PREVIOUS]})


def wait_free_slot(refs: ChannelRefs) -> None:
    """Waits until the next device has a free slot."""
    pl.semaphore_wait(refs.slot_free, 1)


def _send(refs: ChannelRefs, slot: Any, more: Any, later: Any) -> None:
    """Starts the copies to the next device, once it has room."""
    _when(later & more, lambda: wait_free_slot(refs))
    _when(more, lambda: [copy.start() for copy in refs.copies(slot)])


def _receive(refs: ChannelRefs, slot: Any) -> None:
    """Waits until the cargo before has been sent, whose slot is then free, and this one's has come."""
    for copy in refs.copies(1 - slot):
        copy.wait()


def _when(condition: Any, action: Callable[[], Any]) -> None:
    @pl.when(condition)
    def _() -> None:
        action()
