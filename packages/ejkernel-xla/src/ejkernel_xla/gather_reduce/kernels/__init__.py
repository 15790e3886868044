"""The pieces that both passes of gather reduce are computed with."""
