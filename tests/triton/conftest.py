"""Triton has wheels for Linux alone, and the lowering through jax-triton needs that and JAX's own compiler for CUDA."""

import importlib.util


def _lack(*modules):
    return any(importlib.util.find_spec(name) is None for name in modules)


collect_ignore_glob = ["*test_*.py"] if _lack("triton") else []
if _lack("jax_triton", "jax_cuda13_plugin"):
    collect_ignore_glob += ["*test_*lowering.py"]
