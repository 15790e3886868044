"""Operations over TurboQuant caches, against a float64 loop over tokens and numbers; their errors and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paged_loop
import pytest
import turboquant_loop
from paged_calls import QUICK, Paged

import ejkernel
from ejkernel.modules import ragged_page_attention_v2_turboquant, ragged_page_attention_v3_turboquant
from ejkernel.modules.operations.configs import RaggedPageAttentionv3TurboQuantConfig
from ejkernel.ops.plugins import registry

SINKS = np.array([0.5, -1.25, 0.125, 2.0])
PAGES = ("key_indices_pages", "key_signs_pages", "key_norms_pages", "value_indices_pages", "value_norms_pages")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A batch, the pages of its codes, and the batch of what these stand for."""

    paged: Paged
    decoded: paged_loop.Batch
    pages: tuple[np.ndarray, ...]
    made: turboquant_loop.Format

    def arguments(self, op):
        paged, tables = self.paged, self.paged.tables()
        matrices = self.made.rotation, self.made.projection, self.made.key_codebook, self.made.value_codebook
        if op is ragged_page_attention_v2_turboquant:
            return (paged.queries, *self.pages, paged.lens, tables, paged.starts, len(paged.lens), *matrices, SINKS)
        distribution = np.array([0, 0, len(paged.lens)], np.int32)
        news = (paged.news(tokens) for tokens in (paged.batch.keys, paged.batch.values))
        return (paged.queries, *news, *self.pages, paged.lens, tables, paged.starts, distribution, *matrices, SINKS)


def encode(lens, q_lens, projections, bits, *, written):
    """Every sequence as codes; pages lack the tokens of the queries where the call is to write them."""
    batch = paged_loop.make(lens, q_lens)
    made = turboquant_loop.make(8, projections, *bits)

    def each_token(function, tokens):
        rows = [[function(vector, made) for vector in sequence.reshape(-1, 8)] for sequence in tokens]
        parts = zip(*(row for sequence in rows for row in sequence), strict=True)
        ends = np.cumsum([len(sequence) for sequence in tokens])[:-1]
        return [np.split(np.array(part).reshape(len(part) // 2, 2, *np.shape(part[0])), ends) for part in parts]

    *keys, decoded_keys = each_token(turboquant_loop.encode_key, batch.keys)
    *values, decoded_values = each_token(turboquant_loop.encode_value, batch.values)
    paged = Paged(batch, slots=4, dtype=jnp.float64, written=written)
    stored = []
    for n, tokens in enumerate((*keys, *values)):
        filled = tokens if tokens[0].ndim > 2 else [x[..., None] for x in tokens]
        cache = paged.cache(filled).reshape(paged.pages, paged.slots, *tokens[0].shape[1:])
        stored.append(cache if PAGES[n].endswith("norms_pages") else np.nan_to_num(cache, nan=0xA5).astype(np.uint8))
    decoded = paged_loop.Batch(queries=batch.queries, keys=decoded_keys, values=decoded_values)
    return Encoded(paged, decoded, tuple(stored), made)


CALLS = [
    (ragged_page_attention_v2_turboquant, (17, 9, 0, 1, 30), (5, 9, 0, 1, 1), 16, (3, 4)),
    (ragged_page_attention_v3_turboquant, (17, 9, 0, 1, 30), (5, 9, 0, 1, 1), 8, (4, 2)),
    (ragged_page_attention_v3_turboquant, (17, 9, 30), (1, 1, 1), 0, (2, 3)),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("op", "lens", "q_lens", "projections", "bits"), CALLS)
def test_outputs_and_written_codes_are_those_of_the_float64_loop(op, lens, q_lens, projections, bits):
    writes = op is ragged_page_attention_v3_turboquant
    encoded = encode(lens, q_lens, projections, bits, written=not writes)
    options = {"softmax_scale": 0.4, "sliding_window": 7, "logits_soft_cap": 1.5}
    want = paged_loop.packed(encoded.decoded, scale=0.4, window=7, cap=1.5, sinks=SINKS)
    cfg = registry().ops[op.__name__].config(q_blocksize=6, kv_blocksize=10, seq_blocksize=3)
    call = jax.jit(lambda *x: op(*x, **options, platform="xla", cfg=cfg), compiler_options=QUICK)
    returned = call(*encoded.arguments(op))
    output, *pages = returned if writes else (returned,)
    np.testing.assert_allclose(output, want, rtol=1e-11, atol=1e-12)
    complete = encode(lens, q_lens, projections, bits, written=True).pages
    for name, got, expected in zip(PAGES, pages, complete, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=name)


@pytest.mark.usefixtures("x64")
def test_the_reference_of_written_codes_is_the_float64_loop():
    op, lens, q_lens, projections, bits = CALLS[1]
    encoded = encode(lens, q_lens, projections, bits, written=False)
    declared = registry().ops[op.__name__]
    record, _ = declared.bind(encoded.arguments(op), {"sliding_window": (6, 0)})
    output = jax.jit(declared.reference, compiler_options=QUICK)(record)[0]
    np.testing.assert_allclose(
        output, paged_loop.packed(encoded.decoded, window=7, sinks=SINKS), rtol=1e-11, atol=1e-12
    )


def small_call(**changes):
    """A call of version 2 with 3-bit keys, 4-bit values and 8 projections of heads of 8."""
    arrays = {
        "queries": jnp.ones((2, 4, 8)),
        "key_indices_pages": jnp.zeros((3, 4, 2, 3), jnp.uint8),
        "key_signs_pages": jnp.zeros((3, 4, 2, 1), jnp.uint8),
        "key_norms_pages": jnp.ones((3, 4, 2, 2)),
        "value_indices_pages": jnp.zeros((3, 4, 2, 4), jnp.uint8),
        "value_norms_pages": jnp.ones((3, 4, 2)),
        "kv_lens": jnp.array([4, 4]),
        "block_tables": jnp.array([[0], [1]]),
        "query_start_loc": jnp.array([0, 1, 2]),
        "num_seqs": 2,
        "rotation_matrix": jnp.eye(8),
        "qjl_projection": jnp.ones((8, 8)),
        "key_codebook": jnp.linspace(-1, 1, 8),
        "value_codebook": jnp.linspace(-1, 1, 16),
    }
    return {**arrays, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key_indices_pages": jnp.zeros((3, 4, 2, 5), jnp.uint8)},
            r"key_indices_pages: got shape .* one of 1, 2, 3, 4",
        ),
        ({"key_indices_pages": jnp.zeros((3, 4, 2, 3))}, r"key_indices_pages: got dtype float32, wants uint8"),
        (
            {"value_norms_pages": jnp.ones((3, 5, 2))},
            r"value_norms_pages: got shape \(3, 5, 2\), wants \[P=3, S=4, Hk=2\]",
        ),
        ({"key_norms_pages": jnp.ones((3, 4, 2, 1))}, r"key_norms_pages: got shape \(3, 4, 2, 1\), wants .* 2=2\]"),
        ({"queries": jnp.ones((2, 3, 8))}, r"key_indices_pages: got shape .* wants a divisor of the 3 of queries"),
        ({"rotation_matrix": jnp.eye(4)}, r"rotation_matrix: got shape \(4, 4\), wants \[D=8, D=8\]"),
        ({"qjl_projection": jnp.ones((16, 8))}, r"qjl_projection: got shape \(16, 8\), wants \[Q=8, D=8\]"),
        ({"qjl_dim": 128}, r"qjl_dim: got 128, wants the 8 rows of qjl_projection, or None"),
        ({"key_codebook": jnp.ones(16)}, r"key_codebook: got shape \(16,\), wants \[levels\] with 1 to 8 levels"),
        ({"bits": 3}, r"value_codebook: got shape \(16,\), wants .* 1 to 8 levels for pages of 4-bit codes and bits=3"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(changes, message):
    with pytest.raises(ValueError, match=message):
        ragged_page_attention_v2_turboquant(**small_call(**changes))


def test_the_older_name_of_lengths_and_a_configuration_are_taken():
    arguments = small_call()
    output = ragged_page_attention_v2_turboquant(**arguments)
    arguments["context_lens"] = arguments.pop("kv_lens")
    np.testing.assert_array_equal(ragged_page_attention_v2_turboquant(**arguments), output)
    assert RaggedPageAttentionv3TurboQuantConfig(num_warps=4, chunk_prefill_size=8).num_warps == 4


def test_kernels_without_the_format_refuse_it_by_name():
    found = ejkernel.explain(ragged_page_attention_v2_turboquant, **small_call()).forward.verdicts
    others = [verdict for verdict in found if verdict.implementation.name not in ("xla", "mosaic_tpu", "cuda_codes")]
    assert others
    for verdict in others:
        assert any("code_bits" in reason for reason in verdict.reasons), verdict


def test_the_tpu_kernel_refuses_small_pages_of_codes():
    found = ejkernel.explain(ragged_page_attention_v2_turboquant, **small_call()).forward.verdicts
    (reasons,) = (verdict.reasons for verdict in found if verdict.implementation.name == "mosaic_tpu")
    assert any("slots of codes; wants a multiple of 128" in reason for reason in reasons)


def test_gradients_are_refused():
    arguments = small_call()
    queries = arguments.pop("queries")
    with pytest.raises(NotImplementedError, match="ragged_page_attention_v2_turboquant"):
        jax.grad(lambda q: ragged_page_attention_v2_turboquant(q, **arguments).sum())(queries)
