"""What every TPU kernel is built from, free of attention: launching, loops, opaque offsets, division, vectors."""
