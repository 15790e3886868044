"""The pieces that both passes of tiled attention are computed with."""
