"""The few places where JAX moved something, or has no public door yet."""

from typing import Any

import jax
from jax.core import Tracer


def coordination_client() -> Any | None:
    """The key-value client of `jax.distributed`, or None in a single-process job."""
    from jax._src import distributed

    return distributed.global_state.client


def is_tracer(value: Any) -> bool:
    """Whether `value` stands for an array inside a trace."""
    return isinstance(value, Tracer)


def default_device() -> Any:
    """The device JAX would put an uncommitted array on."""
    chosen: Any = jax.config.values["jax_default_device"]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def under_trace() -> bool:
    """Whether JAX is tracing on this thread, so that values are not available."""
    from jax._src import core

    return not core.trace_state_clean()
