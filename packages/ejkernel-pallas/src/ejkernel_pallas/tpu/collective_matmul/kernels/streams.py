"""Streams around a ring, one in each direction, of arrays in two slots of each device's HBM.

    device i - 1            device i                 device i + 1
                  ────────► slot of stream +1 ──────►
                  ◄──────── slot of stream -1 ◄──────

A device sends from one slot to the other slot of the next device, after that device has signalled that the slot is
free: that it has sent on what was there, and has read it.

Hazard: semaphores are shared by consecutive kernels. A device signals a free slot only to a device that has sent to it
in the same kernel, and every signal is waited for before the kernel ends, so that none reaches another kernel.
"""

import dataclasses
from typing import Any, Self

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref

DIRECTIONS = {"ahead": 1, "back": -1}
"""The name of each stream, and the steps along the ring from a device to the one that it sends to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """One direction around the ring, inside a kernel.

    Attributes:
        axis_name: The mesh axis.
        num_devices: Devices along it.
        hop: 1 or -1: steps along the ring to the device that this one sends to.
        device: Index of this device.
        slots: Both slots [2, ...], in HBM.
        sent: DMA semaphore of sends.
        arrived: DMA semaphores of receives, one per slot.
        slot_free: Counts the free slots of the device that this one sends to.
    """

    axis_name: str
    num_devices: int
    hop: int
    device: Any
    slots: Ref
    sent: Ref
    arrived: Ref
    slot_free: Ref

    @classmethod
    def both(cls, axis_name: str, num_devices: int, refs_by_name: dict[str, Any]) -> tuple[Self, Self]:
        """Returns both streams; their slots and semaphores, and `device`, are removed from `refs_by_name`."""
        device = refs_by_name.pop("device")[0]

        def stream(name: str) -> Self:
            parts = {part: refs_by_name.pop(f"{name}_{part}") for part in ("slots", "sent", "arrived", "slot_free")}
            return cls(axis_name=axis_name, num_devices=num_devices, hop=DIRECTIONS[name], device=device, **parts)

        return stream("ahead"), stream("back")

    def device_at(self, steps: Any) -> Any:
        """Returns the index of the device that is some steps further along this stream; negative before this device."""
        return lax.rem(self.device + self.hop * steps + self.num_devices, self.num_devices)

    def copy(self, source: Ref, slot: Any) -> Any:
        """Returns the copy of an array to a slot of the next device; or what waits for the copy to this device's."""
        return pltpu.make_async_remote_copy(
            src_ref=source,
            dst_ref=self.slots.at[slot],
            send_sem=self.sent,
            recv_sem=self.arrived.at[slot],
            device_id={self.axis_name: self.device_at(1)},
        )

    def signal_free_slot(self) -> None:
        """Signals the device that sends to this one that the slot which it sends to next is free."""
        signal_device(self.slot_free, self.axis_name, self.device_at(-1))

    def wait_free_slot(self) -> None:
        """Waits until the device that this one sends to has a free slot."""
        pl.semaphore_wait(self.slot_free, 1)


def signal_device(semaphore: Ref, axis_name: str, device: Any) -> None:
    """Adds 1 to a semaphore of another device."""
    pl.semaphore_signal(semaphore, 1, device_id={axis_name: device})


def stream_scratch() -> dict[str, Any]:
    """Returns the semaphores of both streams."""
    return {
        f"{name}_{part}": semaphore
        for name in DIRECTIONS
        for part, semaphore in (
            ("sent", pltpu.SemaphoreType.DMA),
            ("arrived", pltpu.SemaphoreType.DMA((2,))),
            ("slot_free", pltpu.SemaphoreType.REGULAR),
        )
    }


def wait_for_neighbours(streams: tuple[Stream, Stream]) -> None:
    """Waits until both neighbours run this kernel: a remote copy needs a target whose memory belongs to the kernel."""
    here = pltpu.get_barrier_semaphore()
    for stream in streams:
        signal_device(here, stream.axis_name, stream.device_at(1))
    pl.semaphore_wait(here, len(streams))


def for_each_arrival(streams: tuple[Stream, Stream], local_arrays: tuple[Ref, Ref], process: Any) -> None:
    """Processes a pair of arrays of every device, one per stream, while they are also sent on.

        step            0              1                    2
        process         local arrays   of i - 1 and i + 1   of i - 2 and i + 2
        transfers       of step 1      of step 2            ...

    Args:
        streams: Both streams.
        local_arrays: What this device gives to each stream, in HBM.
        process: Called with the step and a pair of arrays; that of a stream is of the device `-step` along it.
    """
    wait_for_neighbours(streams)
    first_sends = [stream.copy(local, 1) for stream, local in zip(streams, local_arrays, strict=True)]
    for send in first_sends:
        send.start()
    process(0, local_arrays)
    for send in first_sends:
        send.wait_send()

    def step(number: Any, carry: None) -> None:
        slot = lax.rem(number, 2)
        arrived = tuple(stream.slots.at[slot] for stream in streams)
        sends = [stream.copy(array, 1 - slot) for stream, array in zip(streams, arrived, strict=True)]
        for stream, array in zip(streams, arrived, strict=True):
            stream.copy(array, slot).wait_recv()
        _run_when(number + 1 < streams[0].num_devices, lambda: _send_on(streams, sends))
        # The arrays are being sent meanwhile: both only read them.
        process(number, arrived)
        # Hazard: the device before this one writes this slot next, so the send from it must have finished.
        _run_when(number + 1 < streams[0].num_devices, lambda: [send.wait_send() for send in sends])

    lax.fori_loop(1, streams[0].num_devices, step, None)


def _send_on(streams: tuple[Stream, Stream], sends: list[Any]) -> None:
    """Starts the copies to the next devices, whose slots are free once they have signalled it."""
    for stream, send in zip(streams, sends, strict=True):
        stream.signal_free_slot()
        stream.wait_free_slot()
        send.start()


def _run_when(condition: Any, action: Any) -> None:
    @pl.when(condition)
    def _() -> None:
        action()
