"""The kernels of the lightning indexer."""
