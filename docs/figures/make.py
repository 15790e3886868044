"""Draws every figure: `python docs/figures/make.py [folder]`."""

import sys
from pathlib import Path

import algorithms
import architecture
import block_maps
import experts
import hopper_pipeline
import recall
import recurrence_vmem
import serving
import sparse
import speed
import terminal
from style import HERE

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for figures in (
        architecture,
        block_maps,
        hopper_pipeline,
        algorithms,
        speed,
        experts,
        sparse,
        serving,
        recall,
        recurrence_vmem,
        terminal,
    ):
        figures.draw(folder)
