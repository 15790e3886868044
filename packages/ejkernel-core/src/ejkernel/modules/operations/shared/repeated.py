"""Fields of public configurations that repeat arguments of the call."""

from typing import Any

from ejkernel.ops.params import BaseOperationConfig


def check_config_agrees_with_call(cfg: BaseOperationConfig | None, **arguments: Any) -> None:
    """Refuses a configuration that contradicts the call: configurations never change an answer.

    Args:
        cfg: The call's configuration, or None.
        **arguments: The call's values, by the name of the configuration's field.

    Raises:
        ValueError: A field is set to something else.
    """
    for name, value in arguments.items():
        chosen = getattr(cfg, name, None)
        if chosen is not None and chosen != value:
            raise ValueError(f"cfg: got {name}={chosen!r}, wants the call's {value!r}; give the argument {name}")
