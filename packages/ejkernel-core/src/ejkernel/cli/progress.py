"""Shows the progress of slow commands on the standard error."""

import contextlib
import sys
from collections.abc import Callable, Generator


@contextlib.contextmanager
def progress_bar(total: int) -> Generator[Callable[[str], None]]:
    """Shows a bar on the standard error inside the block, if that is a terminal.

    Yields:
        A function that ends one step and names the next.
    """
    import tqdm

    with tqdm.tqdm(total=total, unit="step", leave=False, disable=not sys.stderr.isatty()) as bar:
        bar.set_description_str("compile")

        def finish_step(next_step: str) -> None:
            bar.update()
            bar.set_description_str(next_step)

        yield finish_step


def format_duration(seconds: float) -> str:
    """Formats a rough duration: `"5 s"`, `"3 min"`, `"2.5 h"`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
