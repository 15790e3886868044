"""Tile maps of masks: which tiles of the scores are full, partial or empty, as the kernels' own planning has them."""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from style import BLUE, CARD, LIGHT_BLUE, MUTED, save

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import block_map
from ejkernel.types import MaskInfo
from ejkernel.types.sparse_masks import NumpyMask

LENGTH, BLOCK = 64, 8


def records() -> dict[str, TiledAttention]:
    """One record for each kind of mask."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 16), "float32")
    lengths = np.array([0, 20, 30, 56, 64], np.int32)
    segments = MaskInfo.from_cu_seqlens(lengths, max_q_len=LENGTH).q_segment_ids
    tiles = np.arange(LENGTH) // BLOCK
    strided = (tiles[:, None] - tiles) % 3 == 0
    kinds = {
        "causal": {"causal": True},
        "causal, window of 16": {"causal": True, "sliding_window": (15, 0)},
        "packed sequences, causal": {"causal": True, "q_segment_ids": segments, "kv_segment_ids": segments},
        "block mask": {"pattern": NumpyMask(strided)},
    }
    return {name: TiledAttention(query=x, key=x, value=x, softmax_scale=0.25, **kind) for name, kind in kinds.items()}


def draw(folder: Path) -> None:
    """A panel for each kind of mask."""
    figure, panels = plt.subplots(1, 4, figsize=(12, 3.4))
    for axes, (name, record) in zip(panels, records().items(), strict=True):
        blocks = block_map(record, BLOCK, BLOCK)
        some, every = np.asarray(blocks.any_allowed)[0, 0], np.asarray(blocks.all_allowed)[0, 0]
        axes.imshow(some.astype(int) + (some & every), cmap=ListedColormap([CARD, LIGHT_BLUE, BLUE]), vmin=0, vmax=2)
        axes.set(title=name, xlabel="key tiles", ylabel="query tiles", xticks=[], yticks=[])
        axes.set_xticks(np.arange(-0.5, LENGTH // BLOCK), minor=True)
        axes.set_yticks(np.arange(-0.5, LENGTH // BLOCK), minor=True)
        axes.grid(which="minor", color=MUTED, linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    names = ("full: no mask is applied", "partial: pairs are masked", "empty: skipped")
    patches = [
        Patch(facecolor=color, edgecolor=MUTED, label=n)
        for color, n in zip((BLUE, LIGHT_BLUE, CARD), names, strict=True)
    ]
    figure.legend(handles=patches, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save(figure, "block_maps", folder)
