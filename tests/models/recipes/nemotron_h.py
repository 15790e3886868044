"""Nemotron-H: Mamba-2 with a least step size."""

import math
from functools import partial

from tests.models.recipes.shared import mamba2
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "nemotron_h.NemotronHMamba2Mixer"
LEAST_STEP = 0.4
prefill, packed, decode = functions_of(partial(mamba2.mix, norm_before_gate=False, dt_limit=(LEAST_STEP, math.inf)))
empty_cache = mamba2.empty_cache
