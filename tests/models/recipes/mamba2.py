"""Mamba-2: heads with a scalar gate, and a norm in groups after the gate."""

from functools import partial

from tests.models.recipes.shared import mamba2
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "mamba2.Mamba2Mixer"
prefill, packed, decode = functions_of(partial(mamba2.mix, norm_before_gate=False))
empty_cache = mamba2.empty_cache
