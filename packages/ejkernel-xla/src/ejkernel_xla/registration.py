"""The shared registration of all XLA implementations."""

from collections.abc import Iterable

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.no_tpu_kernel import REASONS

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def xla_implementation(
    family: str,
    *,
    handles: Iterable[str],
    config: ConfigSpace,
    gradients: Iterable[str] = (),
    forward: str = "forward:forward",
    backward: str | None = "backward:backward",
    dtypes: frozenset[str] = FLOATS,
    symbolic: bool = True,
) -> Implementation:
    """Returns an implementation for every device.

    Args:
        family: The family it serves, and the folder here that has its passes.
        handles: Optional fields that it honours. A family's fallback gives all there are, with `optional_fields`: the
            conformance suite fails for one that it does not honour.
        config: What can be chosen.
        gradients: Fields that get a gradient.
        forward: "module:function" in the family's folder.
        backward: The same; None without one.
        dtypes: Those it takes.
        symbolic: Whether it takes symbolic sizes.
    """
    folder = f"ejkernel_xla.{family}"
    return Implementation(
        family=family,
        name="xla",
        platform="xla",
        forward=f"{folder}.{forward}",
        backward=None if backward is None else f"{folder}.{backward}",
        gradients=frozenset(gradients),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}), symbolic=symbolic, dtypes=dtypes, handles=frozenset(handles)
        ),
        config=config,
        instead_of_kernel={"tpu": REASONS[family]} if family in REASONS else {},
    )
