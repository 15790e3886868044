"""A terminal picture of a MaskInfo."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.types.checks import check_choice, check_static_size
from ejkernel.types.debug import is_traced
from ejkernel.types.mask_parts import MaskParts
from ejkernel.types.segments import mask_to_segment_ids

# How a block is drawn: no pair attends, some do, all do.
_CHARSETS = {"unicode": "·▒█", "ascii": ".+#"}
_SEGMENT_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PADDING_LABEL, _SEVERAL_SEGMENTS_LABEL = -1, -2


class _PictureAxis(NamedTuple):
    """One axis of the picture: where its blocks start, how many tokens there are, and the segment of each block."""

    length: int
    block: int
    ids: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return np.arange(0, self.length, self.block)

    @property
    def sizes(self) -> np.ndarray:
        return np.minimum(self.length - self.starts, self.block)

    def segment_labels(self) -> list[int]:
        """Returns every block's segment id, `_PADDING_LABEL`, or `_SEVERAL_SEGMENTS_LABEL` if it has more than one."""
        blocks = (np.maximum(self.ids[start : start + self.block], _PADDING_LABEL) for start in self.starts)
        return [int(ids[0]) if (ids == ids[0]).all() else _SEVERAL_SEGMENTS_LABEL for ids in blocks]


def visualize(  # noqa: PLR0913 - a public method
    info: MaskParts,
    block_size: int | tuple[int, int] = 32,
    batch: int = 0,
    head: int = 0,
    fit_in_screen: bool = True,
    max_rows: int = 32,
    max_cols: int = 64,
    charset: Literal["unicode", "ascii"] = "unicode",
    show_segments: bool = True,
    return_str: bool = False,
) -> str | None:
    """Draws the mask of one batch row and head; a cell is a block of tokens, empty, partly or fully attended.

    Segment ids stand to the left of the queries and above the keys (there their last base-36 digit; `-` padding, `?`
    several). Only the part that is drawn is computed, a row of cells at a time.

    Args:
        info: The mask, with values: not under jit.
        block_size: Tokens in a cell, or (queries, keys) in a cell.
        batch: Row of the batch.
        head: Head of the stored mask; 0 if it is shared by the heads.
        fit_in_screen: Whether blocks grow, by whole multiples, until the picture fits `max_rows` and `max_cols`.
        max_rows: Most rows of cells.
        max_cols: Most columns of characters. A cell takes two if that fits, since a character is about twice as high as
            wide.
        charset: "unicode" for `·▒█`, "ascii" for `.+#`.
        show_segments: Whether segment ids are shown.
        return_str: Whether the picture is returned and not printed.

    Returns:
        The picture, or None if it was printed.

    Raises:
        ValueError: The mask is traced or empty, `batch` or `head` is out of range, or another argument is.
    """
    check_choice("charset", charset, tuple(_CHARSETS))
    if any(is_traced(leaf) for leaf in jax.tree.leaves(info)):
        raise ValueError("visualize needs values, but this MaskInfo is traced; call it outside jit, vmap and grad")
    mask, q_ids, kv_ids = _mask_and_ids_on_host(info, batch, head)
    q_block, kv_block = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    rows = _picture_axis(q_ids, q_block, ("max_rows", max_rows if fit_in_screen else None))
    columns = _picture_axis(kv_ids, kv_block, ("max_cols", max_cols if fit_in_screen else None))
    width = 1 if fit_in_screen and 2 * len(columns.starts) > max_cols else 2
    lines = _draw_cells(_attended_fractions(mask, rows, columns), _CHARSETS[charset], width)
    if show_segments:
        lines = _add_segments(lines, rows, columns, width)
    where = (
        f"batch={batch}, head={head}, {rows.length} x {columns.length} tokens, {rows.block} x {columns.block} per cell"
    )
    text = "\n".join([f"Attention mask ({where})", *lines, *_legend_lines(_CHARSETS[charset], show_segments)])
    if return_str:
        return text
    print(text)
    return None


def _mask_and_ids_on_host(info: MaskParts, batch: int, head: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the explicit mask [q_len, kv_len] (None if ids say it all) and the ids of one row and head."""
    if info.is_empty:
        raise ValueError("an empty MaskInfo has nothing to draw; make it with a mask or with segment ids")
    stored = info.explicit_mask
    sizes = {"batch": (batch, info.batch_size), "head": (head, 1 if stored is None else stored.shape[1])}
    for name, (index, size) in sizes.items():
        if not 0 <= index < (size or 0):
            raise ValueError(f"{name} must be from 0 to {(size or 0) - 1}, got {index}")
    mask = None if stored is None else np.asarray(stored[batch if stored.shape[0] > 1 else 0, head])
    q_ids, kv_ids = info.explicit_q_segment_ids, info.explicit_kv_segment_ids
    if q_ids is None or kv_ids is None:
        q_ids, kv_ids = mask_to_segment_ids(jnp.asarray(mask))
        return mask, np.asarray(q_ids), np.asarray(kv_ids)
    return mask, np.asarray(q_ids[batch]), np.asarray(kv_ids[batch])


def _picture_axis(ids: np.ndarray, block_size: Any, limit: tuple[str, int | None]) -> _PictureAxis:
    """Returns one axis, with blocks large enough for at most `limit` cells."""
    block = check_static_size("block_size", block_size, minimum=1)
    name, most_cells = limit
    if most_cells is not None:
        cells = cdiv(len(ids), block)
        block *= max(1, cdiv(cells, check_static_size(name, most_cells, minimum=1)))
    return _PictureAxis(len(ids), block, ids)


def _attended_fractions(mask: Any, rows: _PictureAxis, columns: _PictureAxis) -> np.ndarray:
    """Returns the share of attending pairs of every cell, one row of cells at a time so that no second full mask is
    made.
    """
    fractions = np.zeros((len(rows.starts), len(columns.starts)))
    if fractions.size == 0:
        return fractions
    for cell, (start, size) in enumerate(zip(rows.starts, rows.sizes, strict=True)):
        ids = rows.ids[start : start + size, None]
        attends = (ids == columns.ids[None, :]) & (ids >= 0)
        if mask is not None:
            attends &= mask[start : start + size]
        counts = np.add.reduceat(attends.sum(axis=0), columns.starts)
        fractions[cell] = counts / (size * columns.sizes)
    return fractions


def _draw_cells(attended_fractions: np.ndarray, blocks: str, characters_per_cell: int) -> list[str]:
    empty, partial, full = blocks
    marks = np.where(attended_fractions == 0, empty, np.where(attended_fractions == 1, full, partial))
    return ["".join(mark * characters_per_cell for mark in line) for line in marks.tolist()]


def _add_segments(cell_lines: list[str], rows: _PictureAxis, columns: _PictureAxis, width: int) -> list[str]:
    words = {_PADDING_LABEL: "pad", _SEVERAL_SEGMENTS_LABEL: "mix"}
    labels = [words.get(label, str(label)) for label in rows.segment_labels()]
    margin = max((len(label) for label in labels), default=0)
    digits = {_PADDING_LABEL: "-", _SEVERAL_SEGMENTS_LABEL: "?"}
    ruler = "".join(digits.get(i, _SEGMENT_DIGITS[i % len(_SEGMENT_DIGITS)]) * width for i in columns.segment_labels())
    drawn = [f"{label:>{margin}} {line}" for label, line in zip(labels, cell_lines, strict=True)]
    return [" " * (margin + 1) + ruler, *drawn]


def _legend_lines(blocks: str, show_segments: bool) -> list[str]:
    legend = [f"cells: {blocks[2]} all pairs attend, {blocks[1]} some, {blocks[0]} none"]
    if show_segments:
        legend.append("segment ids: queries left, keys above (last base-36 digit); pad, - padding; mix, ? several")
    return legend
