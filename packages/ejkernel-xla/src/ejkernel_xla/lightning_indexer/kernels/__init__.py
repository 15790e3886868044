"""The pieces that the passes of the lightning indexer are computed with."""
