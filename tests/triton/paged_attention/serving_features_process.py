"""Every pair of features of serving in every operation over pages; interpreted, run by `test_paged_attention.py`."""

import sys
from pathlib import Path

import jax.numpy as jnp

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / "core" / "modules" / "operations"), str(TESTS / "loops")]

from paged_calls import OPS  # noqa: E402 - the path is above
from serving_features import LATENT, check_pairs  # noqa: E402 - as above


def main():
    for op in sys.argv[1:] or (*OPS, *LATENT[:1]):
        check_pairs(op, jnp.float32, "triton", rtol=2e-5, atol=2e-5)
        print(op)


if __name__ == "__main__":
    main()
