"""The overlay tier: configurations for the calls traced inside a block."""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

import jax

from ejkernel.ops.config.check_cfg import check_cfg
from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.params import BaseOperationConfig
from ejkernel.ops.plugins import registry

_Overlay = tuple[tuple[ConfigKey | str, Any], ...]

# Part of the key of every jitted function, innermost overlay first; made at import for the reasons given in `policy`.
_overlay_context: Any = jax.make_user_context(())


@contextlib.contextmanager
def overlay_cache(mapping: Mapping[ConfigKey | str, Any]) -> Generator[None]:
    """Uses the given configurations for the calls traced inside the block, before any cache is asked.

    Args:
        mapping: Maps an operation's name to its configuration, or a `ConfigKey` to a configuration part.
            Inner blocks win over outer ones; a `ConfigKey` wins over a name. A configuration made for one platform
            or backend does not apply to another's implementation.

    Raises:
        ValueError: A name is no operation's, or is mapped to something that is not that operation's configuration; or
            a key is neither a name nor a `ConfigKey`, or is mapped to something that is not a configuration part.
    """
    unchecked: Any = mapping
    if not isinstance(unchecked, Mapping):
        raise ValueError(f"mapping: got {type(unchecked).__name__}, wants a mapping of operations to configurations")
    key: Any
    for key, config in mapping.items():
        if isinstance(key, str):
            check_cfg(registry().op(key), config, f"mapping[{key!r}]")
        elif not isinstance(key, ConfigKey):
            raise ValueError(f"mapping: got the key {key!r}, wants the name of an operation or a ConfigKey")
        elif not dataclasses.is_dataclass(config) or isinstance(config, type):
            raise ValueError(f"mapping[{key}]: got {config!r}, wants a configuration part")
    with _overlay_context((tuple(mapping.items()), *overlays())):
        yield


def overlays() -> tuple[_Overlay, ...]:
    """Returns the active overlays, innermost first."""
    return _overlay_context.value


def restored_overlays(active: tuple[_Overlay, ...]) -> contextlib.AbstractContextManager[None]:
    """Returns a block in which the given overlays are active, and no others."""
    return _overlay_context(active)


def find_overlay_part(key: ConfigKey, platform_and_backend: Mapping[str, str]) -> tuple[Any | None, str]:
    """Returns the part that the innermost overlay knowing this call has for it, or None; and a remark.

    Args:
        key: The call.
        platform_and_backend: `platform` and `backend` of the call's implementation and device.
    """
    op_name, remark = key.op.rpartition("@")[0], "none active for this call"
    for overlay in map(dict, overlays()):
        if key in overlay:
            return overlay[key], "entry for this very call"
        config = overlay.get(op_name)
        mismatch = None if config is None else setting_mismatch(config, platform_and_backend)
        if mismatch:
            remark = f"skipped, {mismatch}"
        elif config is not None and (part := config.part_of(key.direction)) is not None:
            return part, f"entry for {op_name}"
    return None, remark


def setting_mismatch(config: BaseOperationConfig, platform_and_backend: Mapping[str, str]) -> str:
    """Returns the setting of a configuration that does not fit the call, such as its platform; empty if all fit."""
    for name, value in platform_and_backend.items():
        setting = getattr(config, name)
        if setting not in ("auto", "any", value):
            return f"made for {name} {setting}, not {value}"
    return ""
