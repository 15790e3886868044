"""Logging for programs that use the library: nothing is set up, read or imported before the first message.

The library itself logs nothing. `rich` draws colours and progress; it leaves colours out if the output is not a
terminal, or if `NO_COLOR` is set.
"""

import functools
import logging
import os
import time
from typing import TYPE_CHECKING, Any, final

from ejkernel import _compat

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ColorFormatter", "LazyLogger", "ProgressLogger", "get_logger"]

LEVEL_ENVIRONMENT_VARIABLE = "LOGGING_LEVEL_ED"
DEFAULT_LEVEL = "INFO"
LEVEL_STYLES = {"DEBUG": "blue", "INFO": "cyan", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


@final
class ColorFormatter(logging.Formatter):
    """`12:30:59 WARNING name: message`, the level and the name in the level's colour.

    Args:
        color: Whether to colour.
    """

    def __init__(self, color: bool = True) -> None:
        super().__init__("%(asctime)s %(head)s %(message)s", datefmt="%H:%M:%S")
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Fills the line in; called by `format`."""
        head = f"{record.levelname} {record.name}:"
        if self._color:
            from rich.color import ColorSystem
            from rich.style import Style

            style = Style.parse(LEVEL_STYLES.get(record.levelname, "none"))
            head = style.render(head, color_system=ColorSystem.STANDARD)
        record.__dict__["head"] = head  # how the format finds it
        return super().formatMessage(record)


@final
class LazyLogger:
    """A `logging.Logger` that is made when it is first used; it has all its methods and attributes.

    Args:
        name: Of the logger.
        level: As of `get_logger`.
    """

    def __init__(self, name: str, level: int | str | None = None) -> None:
        self._name = name
        self._level = level

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """Returns the logger, and configures it when it is first used."""
        logger = logging.getLogger(self._name)
        logger.setLevel(_level_number(self._level))
        # Where the program has set logging up, it decides where messages go and what they look like.
        if not logger.hasHandlers():
            logger.addHandler(_stream_handler())
            logger.propagate = False
        return logger

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.logger, name)


def get_logger(name: str, level: int | str | None = None) -> LazyLogger:
    """Returns a logger that costs nothing until it is used.

    With its first message it gets its level and, unless the program has set up logging itself, a handler that writes
    coloured lines to the standard error. Processes of a job other than the first log warnings and worse alone; no JAX
    backend is started to find out.

    Args:
        name: Of the logger.
        level: Number or name of the least level that is logged; None means what the environment variable
            `LOGGING_LEVEL_ED` names at the first message, or INFO.

    Raises:
        ValueError: At the first message: there is no such level.

    Example:
        ```python
        from ejkernel.loggings import get_logger

        logger = get_logger("training")
        logger.info("step %d", 1)
        ```
    """
    return LazyLogger(name, level)


def _level_number(argument: int | str | None) -> int:
    source = "level" if argument is not None else LEVEL_ENVIRONMENT_VARIABLE
    level = os.environ.get(LEVEL_ENVIRONMENT_VARIABLE, DEFAULT_LEVEL) if argument is None else argument
    if isinstance(level, str):
        known = logging.getLevelNamesMapping()
        if level.strip().upper() not in known:
            raise ValueError(f"{source}: got {level!r}, wants one of {', '.join(known)}")
        level = known[level.strip().upper()]
    return level if _compat.process_index() == 0 else max(level, logging.WARNING)


def _stream_handler() -> logging.Handler:
    from rich.console import Console

    handler = logging.StreamHandler()
    handler.setFormatter(ColorFormatter(color=Console(stderr=True).color_system is not None))
    return handler


@final
class ProgressLogger:
    """A line of progress on a terminal, and a logged message at the end.

    Where the standard error is no terminal, only `complete` shows. Nothing is drawn before the first update, and
    nothing by processes of a job other than the first.

    Args:
        name: Of what goes on.
        logger_instance: Where the end is logged; None means `get_logger(name)`.

    Example:
        ```python
        from ejkernel.loggings import ProgressLogger

        progress = ProgressLogger("tuning")
        for step in range(3):
            progress.update(step + 1, 3, "flash_attention")
        progress.complete("tuned 3 calls")
        ```
    """

    def __init__(self, name: str = "progress", logger_instance: LazyLogger | None = None) -> None:
        self._name = name
        self._logger = get_logger(name) if logger_instance is None else logger_instance
        self._start = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(
        self,
        current: int,
        total: int,
        message: str = "",
        bar_width: int | None = None,
        show_eta: bool = True,
        extra_info: str = "",
    ) -> None:
        """Shows how far it is.

        Args:
            current: Steps done.
            total: Steps in all.
            message: What is being done.
            bar_width: Columns of the bar, before anything is drawn; None for rich's own.
            show_eta: Whether the time that is left is shown, before anything is drawn.
            extra_info: Follows the message.

        Raises:
            ValueError: `current` is not within 0 and `total`.
        """
        if not 0 <= current <= total:
            raise ValueError(f"current: got {current}, wants a number of steps from 0 to total={total}")
        text = " ".join(filter(None, (self._name, message, extra_info)))
        self._show_progress(text, current, total, bar_width, show_eta)

    def update_simple(self, message: str) -> None:
        """Shows what is being done, where the amount of work is unknown."""
        self._show_progress(f"{self._name} {message}", None, None)

    def complete(self, message: str | None = None, show_time: bool = True) -> None:
        """Takes the line away and logs a message, `"done"` without one, with the time since the object was made."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None
        if show_time:
            self._logger.info("%s (%.1f s)", message or "done", time.monotonic() - self._start)
        else:
            self._logger.info("%s", message or "done")

    def _show_progress(
        self, text: str, current: int | None, total: int | None, bar_width: int | None = None, show_eta: bool = True
    ) -> None:
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = [TextColumn("{task.description}"), BarColumn(bar_width or 40), TaskProgressColumn()]
            columns += [TimeRemainingColumn()] if show_eta else []
            console = Console(stderr=True)
            disable = not console.is_terminal or _compat.process_index() != 0
            self._progress = Progress(*columns, console=console, transient=True, disable=disable)
            self._task = self._progress.add_task(text, total=None)
            self._progress.start()
        from rich.markup import escape

        self._progress.update(self._task, description=escape(text), completed=current, total=total)
