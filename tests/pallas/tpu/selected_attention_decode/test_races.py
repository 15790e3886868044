"""The decode kernel of native sparse attention under a simulator of the TPU's copies, watched for races."""

import jax
import pytest
from jax import lax
from tpu_block_records import record, with_empty_list, with_nan
from tpu_races import found
from tpu_records import close, simulated

from ejkernel.families.selected_attention import reference
from ejkernel_pallas.tpu.selected_attention_decode.config import TpuSelectedDecode
from ejkernel_pallas.tpu.selected_attention_decode.forward import forward
from ejkernel_pallas.tpu.selected_attention_decode.kernels import load_rows

TILES = TpuSelectedDecode(block_kv=128, lists=2)
SMALL = (2, 1, 4, 2, 32)
RECORDS = {
    "pages, two steps of a list, window": record(SMALL, "float32", blocks=(32, 6), slots=32, window_size=40),
    "dense, an empty list": with_empty_list(
        record(SMALL, "float32", blocks=(32, 3), slots=160, entries=1, pages=False)
    ),
}


def read_words(buffer, spec, first, count, stride):
    """What `load_rows.load_words` reads, without a view of another shape, which the simulator does not have."""
    rows = buffer[...].reshape(-1, buffer.shape[-1])
    return lax.dynamic_slice_in_dim(rows, first, (count - 1) * stride + 1)[::stride]


@pytest.mark.parametrize("name", RECORDS)
def test_copies_blocks_without_races(name, monkeypatch):
    monkeypatch.setattr(load_rows, "load_words", read_words)
    given = RECORDS[name]
    with simulated():
        output = jax.block_until_ready(jax.jit(lambda given: forward(given, TILES)[0])(with_nan(given)))
    assert not found()
    close(output, reference(given)[0], given.query.dtype)
