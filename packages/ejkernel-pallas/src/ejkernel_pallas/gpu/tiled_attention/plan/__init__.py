"""What is computed before the kernels run: block maps, patterns, ranges of keys and of segments, and orders."""
