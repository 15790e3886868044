"""Falcon Mamba: Mamba with norms, without weights, of the step sizes, B and C."""

from functools import partial

from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared import mamba
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "falcon_mamba.FalconMambaMixer"


def normalise(w, *pieces):
    return [rms_norm(piece, 1.0) for piece in pieces]


prefill, packed, decode = functions_of(partial(mamba.mix, normalise=normalise))
empty_cache = mamba.empty_cache
