"""The key of a stored configuration."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from ejkernel._version import __version__
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.types.arguments import non_default_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """Identifies the calls that share a configuration.

    Attributes:
        op: `"name@version"` of the operation.
        implementation: `"name@distribution version"` of the implementation.
        direction: Which pass.
        device: Device kind.
        schema: Hash of the configuration part's type, so that changed fields never meet old data.
        call: Signature of the lowered record.
        core: Version of ejkernel-core, whose lowering gives `call` its meaning.
    """

    op: str
    implementation: str
    direction: Direction
    device: str
    schema: str
    call: str
    core: str = __version__

    def __str__(self) -> str:
        return " | ".join(getattr(self, f.name) for f in dataclasses.fields(self))

    def as_shipped_key(self, kind: str | None = None) -> str:
        """Returns the key in a table that ships inside a backend: without the versions, which the package itself fixes.

        Args:
            kind: The kind of the calls that share the entry; None for an entry of a single call.
        """
        # A table ships under the name that its package gave the implementation, which may be qualified here.
        name = self.implementation.partition("@")[0].rpartition(":")[2]
        return str(dataclasses.replace(self, implementation=name, core="shipped", call=kind or self.call))


def signature(record: Any) -> str:
    """Returns the shapes, dtypes and structural arguments of a record, as one readable line.

    Values of arrays and continuous factors (scales, caps, probabilities) change no kernel's cost, so only their
    presence counts.
    """
    present = set(non_default_fields(record))
    fields = [f for f in dataclasses.fields(record) if f.default is dataclasses.MISSING or f.name in present]
    return " ".join(f"{f.name}={_field_signature(f, getattr(record, f.name))}" for f in fields)


def _field_signature(field: Any, value: Any) -> str:
    if field.metadata.get("static"):
        return "float" if isinstance(value, float) else str(value).replace(" ", "")
    # The paths of the leaves are part of the key: MaskInfo may hold ids of queries, or ids of keys of the same shape.
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:  # a structure without arrays, such as a number of slots
        return str(value).replace(" ", "")
    return ",".join(jax.tree_util.keystr(path) + _array_signature(leaf) for path, leaf in leaves)


def _array_signature(leaf: Any) -> str:
    return f"{jax.dtypes.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"


@functools.cache
def schema_hash(part: type) -> str:
    """Returns eight hex digits that change with the fields, types or defaults of a configuration type."""
    text = msgspec.json.encode(_schema_without_docs(msgspec.json.schema(part)), order="sorted")
    return hashlib.sha256(text).hexdigest()[:8]


def _schema_without_docs(schema: Any) -> Any:
    """Returns a JSON schema without the words meant for readers, which come from docstrings."""
    if isinstance(schema, list):
        return [_schema_without_docs(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    words = [name for name in ("title", "description") if isinstance(schema.get(name), str)]
    return {name: _schema_without_docs(value) for name, value in schema.items() if name not in words}


def device_label(device: DeviceInfo) -> str:
    """Returns the device's name in keys and in the file names of shipped tables."""
    return device.kind or device.platform
