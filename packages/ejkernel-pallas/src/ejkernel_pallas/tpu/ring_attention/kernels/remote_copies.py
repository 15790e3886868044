"""Sends and receives keys inside a ring kernel, and the gradients (cargo) that travel after them.

Every device has two slots (double buffering). While a device computes tiles from one slot, that load is also copied to
the other slot of the next device, once that device has signalled that the slot is free, i.e. that it has computed with
the load before and has sent it on.

    device i       slot 0: compute load n   │ slot 1: compute load n+1 │ ...
                        └─── remote copy ────────► device i+1, slot 1
                        ◄── "slot 1 is free" ───── device i+1, after its own send from slot 1

    copy my own load to slot 0; signal the device before me that I have started, and wait for the next device's signal
    for every load:
        wait until it has arrived                          (except the first, which is my own)
        signal the device before me that my other slot is free
        wait until the next device's other slot is free    (except at first, when it is)
        start copying the load there
        compute with it
        with cargo: wait until the load's cargo has arrived, add to it, and start copying it to the next device
        wait until the load has been sent

So cargo has the time of `work` to arrive, and leaves a device one load after its keys.

Hazard: semaphores are shared by consecutive kernels. A device receives free-slot signals only from the device that it
sends to, and that device signals only after it has received a load from this one, so both are then in the same kernel.
So no signal of one call reaches another call.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref

RefsByName = dict[str, Ref]
"""Arrays of a load, or of the gradients that it carries, by name."""
LoadProcessor = Callable[[Any, RefsByName], None]
PREVIOUS_DEVICE, NEXT_DEVICE = 0, 1
"""Indices in `neighbours`: of the device that loads come from, and of the device that they go to."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """Arrays that travel together.

    Attributes:
        axis_name: The mesh axis.
        array_names: Names of the arrays; `<name>_slots` has the two slots of each.
        kind: `"load"` or `"gradients"`, the prefix of the names of their semaphores.
    """

    axis_name: str
    array_names: tuple[str, ...]
    kind: str

    def scratch(self) -> dict[str, Any]:
        """Returns the semaphores: of sends, of receives per slot, and of a free slot."""
        count = len(self.array_names)
        return {
            f"{self.kind}_sent": pltpu.SemaphoreType.DMA((count,)),
            f"{self.kind}_arrived": pltpu.SemaphoreType.DMA((2, count)),
            f"{self.kind}_slot_free": pltpu.SemaphoreType.REGULAR,
        }

    def bind_refs(self, refs_by_name: dict[str, Any], neighbours: Ref) -> "ChannelRefs":
        """Returns the refs of this channel; its slots and semaphores are removed from `refs_by_name`."""
        return ChannelRefs(
            channel=self,
            neighbours=neighbours,
            local_arrays=tuple(refs_by_name[name] for name in self.array_names),
            array_slots=tuple(refs_by_name.pop(f"{name}_slots") for name in self.array_names),
            send_semaphores=refs_by_name.pop(f"{self.kind}_sent"),
            receive_semaphores=refs_by_name.pop(f"{self.kind}_arrived"),
            free_slot_semaphore=refs_by_name.pop(f"{self.kind}_slot_free"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelRefs:
    """The refs of a channel inside a kernel.

    Attributes:
        channel: The channel.
        neighbours: int32 [2] in scalar memory, the neighbours' indices along the mesh axis.
        local_arrays: The device's own arrays, in HBM.
        array_slots: Both slots of each array [2, ...], in HBM.
        send_semaphores: DMA semaphores of sends, one per array.
        receive_semaphores: DMA semaphores of receives, [2, arrays].
        free_slot_semaphore: Counts the free slots of the next device.
    """

    channel: Channel
    neighbours: Ref
    local_arrays: tuple[Ref, ...]
    array_slots: tuple[Ref, ...]
    send_semaphores: Ref
    receive_semaphores: Ref
    free_slot_semaphore: Ref

    def local_copies(self) -> list[Any]:
        """Returns the copies of this device's own arrays to slot 0."""
        pairs = enumerate(zip(self.local_arrays, self.array_slots, strict=True))
        return [pltpu.make_async_copy(local, slots.at[0], self.send_semaphores.at[n]) for n, (local, slots) in pairs]

    def copies(self, slot: Any) -> list[Any]:
        """Returns the copies from a slot to the next device; the same descriptors wait for copies from the device
        before.
        """
        return [
            pltpu.make_async_remote_copy(
                src_ref=slots.at[slot],
                dst_ref=slots.at[1 - slot],
                send_sem=self.send_semaphores.at[n],
                recv_sem=self.receive_semaphores.at[1 - slot, n],
                device_id={self.channel.axis_name: self.neighbours[NEXT_DEVICE]},
            )
            for n, slots in enumerate(self.array_slots)
        ]

    def at(self, slot: Any) -> RefsByName:
        """Returns the arrays in a slot."""
        return {name: slots.at[slot] for name, slots in zip(self.channel.array_names, self.array_slots, strict=True)}


@dataclasses.dataclass(frozen=True)
class RingRoute:
    """One direction around the ring.

    Attributes:
        num_loads: How many loads a device processes, its own included.
        load: The channel of the keys.
        carried_gradients: The channel of the gradients that travel after them; it has no arrays if there are none.
    """

    num_loads: int
    load: Channel
    carried_gradients: Channel

    def scratch(self) -> dict[str, Any]:
        """Returns the semaphores of both channels."""
        return self.load.scratch() | (self.carried_gradients.scratch() if self.carried_gradients.array_names else {})

    def for_each_load(
        self,
        load: ChannelRefs,
        carried_gradients: ChannelRefs | None,
        process_load: LoadProcessor,
        process_gradients: LoadProcessor,
    ) -> None:
        """Processes one load after another.

        Args:
            load: The keys.
            carried_gradients: The gradients that travel after them; None if there are none.
            process_load: Called with the index of a load and its arrays by name, without the carried gradients.
            process_gradients: Called with the same and the carried gradients, to which it adds.
        """
        self._copy_local_arrays_and_synchronise([load] if carried_gradients is None else [load, carried_gradients])

        def step(load_index: Any, carry: None) -> None:
            slot = lax.rem(load_index, 2)
            has_next_load, is_later_load = load_index + 1 < self.num_loads, load_index > 0
            # Copies look the same at both ends: the receiving semaphore belongs to the slot that the load arrives in.
            _run_when(is_later_load, lambda: [copy.wait_recv() for copy in load.copies(1 - slot)])
            _run_when(is_later_load & has_next_load, lambda: signal_free_slot(load))
            _start_sending(load, slot, has_next_load, is_later_load)
            here = load.at(slot)
            # The load is being sent to the next device meanwhile: both only read it.
            process_load(load_index, here)
            if carried_gradients is not None:
                _run_when(is_later_load, functools.partial(_wait_for_load, carried_gradients, slot))
                _run_when(is_later_load & has_next_load, functools.partial(signal_free_slot, carried_gradients))
                process_gradients(load_index, {**here, **carried_gradients.at(slot)})
                _start_sending(carried_gradients, slot, has_next_load, is_later_load)
            # Hazard: the previous device writes this slot next, so the send from it must have finished.
            _run_when(has_next_load, lambda: [copy.wait_send() for copy in load.copies(slot)])

        lax.fori_loop(0, self.num_loads, step, None)

    def _copy_local_arrays_and_synchronise(self, channel_refs: list[ChannelRefs]) -> None:
        """Copies the device's own arrays to slot 0, and waits until the next device also runs this kernel."""
        local = [copy for refs in channel_refs for copy in refs.local_copies()]
        for copy in local:
            copy.start()
        if self.num_loads > 1:
            # A remote copy may start only when its target runs this kernel, so that the target's memory belongs to this
            # kernel.
            here = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(here, 1, device_id={self.load.axis_name: channel_refs[0].neighbours[PREVIOUS_DEVICE]})
            pl.semaphore_wait(here, 1)
        for copy in local:
            copy.wait()


def signal_free_slot(refs: ChannelRefs) -> None:
    """Signals the device before this one that the slot which this device is not computing from is free."""
    pl.semaphore_signal(
        refs.free_slot_semaphore, 1, device_id={refs.channel.axis_name: refs.neighbours[PREVIOUS_DEVICE]}
    )


def wait_free_slot(refs: ChannelRefs) -> None:
    """Waits until the next device has a free slot."""
    pl.semaphore_wait(refs.free_slot_semaphore, 1)


def _start_sending(refs: ChannelRefs, slot: Any, has_next_load: Any, is_later_load: Any) -> None:
    """Starts the copies to the next device, once it has a free slot."""
    _run_when(is_later_load & has_next_load, lambda: wait_free_slot(refs))
    _run_when(has_next_load, lambda: [copy.start() for copy in refs.copies(slot)])


def _wait_for_load(refs: ChannelRefs, slot: Any) -> None:
    """Waits until the previous gradients have been sent, which frees their slot, and until this load's have arrived."""
    for copy in refs.copies(1 - slot):
        copy.wait()


def _run_when(condition: Any, action: Callable[[], Any]) -> None:
    @pl.when(condition)
    def _() -> None:
        action()
