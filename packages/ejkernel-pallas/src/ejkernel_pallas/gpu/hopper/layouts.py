"""How vectors of an accumulator's rows and columns lie in the registers of a warpgroup."""

import jax.experimental.pallas.mosaic_gpu as plgpu

ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
