"""The plan that the kernel makes is the one that XLA makes; interpreted, run by `test_paged_attention.py`."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.work import distribute_key_tiles, make_work_list
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.plan import _stack_program_shares, _stack_work_entries, plan_work
from ejkernel_triton.paged_attention.spec import make_spec

CONFIG = PagedForward(block_q=4, block_kv=16, num_programs=7, num_warps=1, num_stages=1)


def batch(seed):
    """A record with up to five sequences, some of them empty, some not live, and rows of no sequence.

    Records have one of three shapes: what is compiled for one serves others.
    """
    rng = np.random.default_rng(seed)
    sequences = int(rng.choice([1, 3, 5]))
    lens = rng.integers(0, 60, sequences)
    q_lens = np.minimum(rng.integers(0, 12, sequences), lens)
    rows = 11 * sequences + 1
    pages = jnp.zeros((20, 8, 2, 16))
    return PagedAttention(
        query=jnp.zeros((rows, 4, 16)),
        key_pages=pages,
        value_pages=pages,
        block_tables=jnp.zeros((sequences, 8), jnp.int32),
        kv_lens=jnp.asarray(lens, jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        softmax_scale=1.0,
        kv_layout="pshd",
        kv_heads=None,
        num_seqs=None if seed % 2 else jnp.int32(rng.integers(0, sequences + 1)),
        sliding_window=(9, 0) if seed % 3 == 0 else None,
        causal=seed % 5 != 1,
        chunk_size=13 if seed % 4 == 1 else None,
    )


def decoding(record):
    """The same with one row a sequence, and first keys."""
    sequences = record.kv_lens.shape[0]
    return dataclasses.replace(
        record,
        query=jnp.zeros((sequences, 4, 16)),
        query_start=None,
        num_seqs=None,
        kv_starts=record.kv_lens // 3,
    )


def check(record):
    config = CONFIG if record.query_start is not None else dataclasses.replace(CONFIG, block_q=1)
    work = make_work_list(record, config.block_q)
    dealt = distribute_key_tiles(work, config.block_kv, 2, config.num_programs)
    spec = make_spec(record, config, work.sequence.shape[0])
    entries, shares = plan_work(record, spec, config)
    live, begins = int(work.num_live), int(np.sum(np.asarray(dealt.begin) < dealt.total))
    want_entries, want_shares = _stack_work_entries(work, dealt), _stack_program_shares(dealt)
    np.testing.assert_array_equal(entries[:live], want_entries[:live])
    assert not np.asarray(entries)[live:, 2].any()
    np.testing.assert_array_equal(shares[:begins], want_shares[:begins])
    np.testing.assert_array_equal(shares[:, 1], want_shares[:, 1])
    np.testing.assert_array_equal(shares[-1], want_shares[-1])
    return live


def main():
    records = [batch(seed) for seed in range(24)]
    lives = [check(record) for record in records] + [check(decoding(record)) for record in records[:8]]
    assert 0 in lives
    assert max(lives) > 5


if __name__ == "__main__":
    main()
