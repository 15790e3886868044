"""Mamba: the selective scan with its short convolution."""

from tests.models.recipes.shared import mamba
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "mamba.MambaMixer"
prefill, packed, decode = functions_of(mamba.mix)
empty_cache = mamba.empty_cache
