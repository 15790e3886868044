"""What tests give to processes that they start."""

import os


def flags_for_devices(count: int) -> str:
    """Returns this process's flags of XLA with another number of host devices: of two equal flags, the last counts."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
