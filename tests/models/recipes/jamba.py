"""Jamba: Mamba with norms of the step sizes, B and C."""

from functools import partial

from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared import mamba
from tests.models.recipes.shared.recurrent import functions_of

SOURCE = "jamba.JambaMambaMixer"
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def normalise(w, *pieces):
    return [rms_norm(piece, w[f"{name}.weight"]) for piece, name in zip(pieces, NORMS, strict=True)]


prefill, packed, decode = functions_of(partial(mamba.mix, normalise=normalise))
empty_cache = mamba.empty_cache
