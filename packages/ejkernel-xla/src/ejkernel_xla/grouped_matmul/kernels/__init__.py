"""The pieces that both passes of grouped matmul are computed with."""
