"""The rings of collective matmul, one per file, and the products of their steps."""
