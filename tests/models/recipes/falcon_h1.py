"""Falcon H1: Mamba-2 with multipliers, limits of the step sizes, and a norm before the gate."""

from functools import partial

import numpy as np
from tests.models.recipes.shared import mamba2
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "falcon_h1.FalconH1Mixer"
STEP_LIMITS = (0.5, 2.0)
INPUT, MULTIPLIERS = 0.5, np.repeat([1.5, 0.75, 1.25, 0.5, 2.0], [32, 32, 8, 8, 4])  # of gate, x, B, C and dt
FACTORS = (INPUT * MULTIPLIERS).astype(np.float32)
prefill, packed, decode = functions_of(partial(mamba2.mix, multipliers=FACTORS, dt_limit=STEP_LIMITS))
empty_cache = mamba2.empty_cache
