"""Bamba: Mamba-2 with one norm of all channels after the gate."""

from functools import partial

from tests.models.recipes.shared import mamba2
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "bamba.BambaMixer"
prefill, packed, decode = functions_of(partial(mamba2.mix, groups=1, norm_before_gate=False))
empty_cache = partial(mamba2.empty_cache, groups=1)
