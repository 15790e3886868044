"""The register layouts of vectors of an accumulator's rows and columns."""

import jax.experimental.pallas.mosaic_gpu as plgpu

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(0)
