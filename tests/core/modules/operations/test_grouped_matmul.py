"""`grouped_matmul`: what it computes, under every transformation, and what it refuses."""

import re

import grouped_matmul_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.modules import GroupedMatmul, GroupedMatmulConfig, grouped_matmul
from ejkernel.modules.operations.grouped_matmul import OP, GroupedMatmulArguments

TILES = GroupedMatmulConfig(block_m=64)  # and tiles of 16 for what is left of a group
POSITIONAL = ("lhs", "rhs", "group_sizes", "group_offset", "existing_out")

# rows, sizes of the groups, number of matrices, offset, optional arguments, transposed
CALLS = {
    "one row": (1, [0, 1], 2, None, (), False),
    "no rows of their own": (5, [0, 0], 2, None, ("existing_out", "rhs_bias"), False),
    "uneven": (129, [63, 0, 1, 65], 4, None, (), False),
    "rows left over": (63, [10, 20], 2, None, ("existing_out", "rhs_bias"), True),
    "more rows than there are": (40, [30, 30, 30], 3, None, ("existing_out",), False),
    "offset": (129, [7, 0, 80, 3, 30], 2, 1, ("existing_out", "rhs_scale"), False),
    "offset past the end": (40, [7, 20, 3], 2, 2, ("rhs_bias",), True),
    "everything, transposed": (63, [16, 0, 47], 3, 0, ("existing_out", "rhs_scale", "rhs_bias", "lhs_scale"), True),
}


def make(name, dtype=np.float64):
    rows, sizes, count, offset, optional, transposed = CALLS[name]
    rng, k, n = np.random.default_rng(0), 60, 7
    shapes = {
        "lhs": (rows, k),
        "rhs": (count, n, k) if transposed else (count, k, n),
        "existing_out": (rows, n),
        "rhs_scale": (count, 4, 1, n),
        "rhs_bias": (count, 1, n),
        "lhs_scale": (rows, 3),
    }
    floats = {field: rng.normal(size=shape).astype(dtype) for field, shape in shapes.items()}
    given = {field: x for field, x in floats.items() if field in ("lhs", "rhs", *optional)}
    rest = {} if offset is None else {"group_offset": offset}
    return given, {"group_sizes": sizes, "transpose_rhs": transposed, **rest}


def run(given, **options):
    """The public call with all arguments by name, and sizes that are traced: others must not exceed the rows."""
    keywords = {field: x for field, x in given.items() if field not in POSITIONAL}

    def call(sizes):
        positional = [sizes if field == "group_sizes" else given.get(field) for field in POSITIONAL]
        return grouped_matmul(*positional, **keywords, **options)

    return jax.jit(call)(given["group_sizes"])


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_the_formula(name):
    with jax.enable_x64(True):
        floats, rest = make(name)
        traced = {"group_sizes": jnp.array(rest["group_sizes"], jnp.int32)}
        if "group_offset" in rest:
            traced["group_offset"] = jnp.array([rest["group_offset"]], jnp.int32)
        names = list(floats)

        def call(*arrays):
            given = {**dict(zip(names, arrays, strict=True)), **traced, "transpose_rhs": rest["transpose_rhs"]}
            return run(given, platform="xla", cfg=TILES)

        def meaning(*arrays):
            given = {**dict(zip(names, arrays, strict=True)), **traced, "transpose_rhs": rest["transpose_rhs"]}
            sizes = given.pop("group_sizes")
            return jax.jit(lambda sizes: OP.reference(GroupedMatmulArguments(group_sizes=sizes, **given)))(sizes)

        arrays, every = [jnp.asarray(x) for x in floats.values()], range(len(names))
        got = transformed.quickly(transformed.graded(call, every))(*arrays)
        assert got[0].dtype == jnp.float64
        transformed.close(got[0], grouped_matmul_loop.grouped_matmul(**floats, **rest), 1e-12, 1e-12)
        transformed.close(got, transformed.quickly(transformed.graded(meaning, every))(*arrays), 1e-11, 1e-11)
        transformed.check_finite_differences(call, arrays, every)


def full(dtype=np.float32):
    """Arrays of a call with everything, in the order of `everything`."""
    floats, rest = make("everything, transposed", dtype)
    return (*floats.values(), jnp.array(rest["group_sizes"], jnp.int32), jnp.array([0], jnp.int32))


def everything(lhs, rhs, existing_out, rhs_scale, rhs_bias, lhs_scale, sizes, offset):
    scales = {"rhs_scale": rhs_scale, "lhs_scale": lhs_scale}
    options = {**scales, "rhs_bias": rhs_bias, "transpose_rhs": True, "cfg": TILES}
    return grouped_matmul(lhs, rhs, sizes, offset, existing_out, **options)


def test_values_and_gradients_under_jax_transforms():
    arrays = full()
    others = (*(x + 1 for x in arrays[:6]), jnp.array([3, 40, 11], jnp.int32), jnp.array([1], jnp.int32))
    transformed.check_transforms(everything, arrays, range(6), others)
    transformed.check_no_new_compilations(everything, arrays, others)


@pytest.mark.parametrize("rows", [127, 128, 130])
def test_t25_existing_out_is_added_whatever_the_number_of_rows(rows):
    rng = np.random.default_rng(1)
    lhs, rhs, existing = (rng.normal(size=s).astype(np.float32) for s in ((rows, 8), (2, 8, 5), (rows, 5)))
    sizes = jnp.array([60, 50])
    plain = grouped_matmul(lhs, rhs, sizes)
    assert bool((plain[110:] == 0).all())
    got = grouped_matmul(lhs, rhs, sizes, None, existing, cfg=GroupedMatmulConfig(block_m=128))
    np.testing.assert_allclose(got, plain + existing, rtol=1e-5, atol=1e-5)


def test_t25_group_offsets_may_be_traced_and_the_parts_add_up():
    rng = np.random.default_rng(1)
    lhs, rhs = rng.normal(size=(40, 8)).astype(np.float32), rng.normal(size=(4, 8, 5)).astype(np.float32)
    sizes, step = jnp.array([9, 0, 21, 10]), jax.jit(lambda *args: grouped_matmul(*args))
    parts = [step(lhs, rhs[n : n + 2], sizes, jnp.array([n])) for n in (0, 2)]
    np.testing.assert_allclose(sum(parts), grouped_matmul(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)
    assert step._cache_size() == 1


def test_t25_rows_of_no_group_have_no_gradient():
    rng = np.random.default_rng(1)
    lhs, rhs = rng.normal(size=(20, 8)).astype(np.float32), rng.normal(size=(2, 8, 5)).astype(np.float32)
    lhs[12:] = np.nan

    def loss(lhs, rhs, bias):
        return jnp.sum(grouped_matmul(lhs, rhs, jnp.array([4, 8]), rhs_bias=bias))

    gradients = jax.grad(loss, (0, 1, 2))(lhs, rhs, jnp.zeros((2, 1, 5)))
    assert bool((gradients[0][12:] == 0).all())
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)
    np.testing.assert_array_equal(gradients[2][:, 0, 0], [4, 8])


def test_undefined_rows_leave_the_others_and_all_gradients_as_they_are():
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, rhs, cotangent = (jax.random.normal(k, s) for k, s in zip(keys, ((30, 8), (3, 8, 8), (30, 8)), strict=True))
    own = (jnp.arange(30) < 25)[:, None]

    def passes(left_over):
        def run(*x):
            return grouped_matmul(*x, jnp.array([9, 0, 16]), left_over=left_over)

        output, pullback = jax.vjp(run, lhs, rhs)
        return jnp.where(own, output, 0), pullback(cotangent)

    transformed.close(passes("undefined"), passes("zero"), 1e-6, 1e-6)


def test_t25_memory_is_that_of_the_arguments():
    k, n, groups = 64, 48, 8
    shapes = jax.ShapeDtypeStruct

    def arrays(rows):
        floats = [(rows, k), (groups, k, n), (rows, n), (groups, 1, n)]
        return *(shapes(s, jnp.float32) for s in floats), shapes((groups,), jnp.int32)

    def call(lhs, rhs, existing_out, rhs_bias, sizes):
        return grouped_matmul(lhs, rhs, sizes, None, existing_out, rhs_bias=rhs_bias)

    short, long = (transformed.temporary_bytes(call, arrays(rows), range(4)) for rows in (2048, 4096))
    assert long <= 2.1 * short
    assert long < 4 * (4096 * (k + n) + groups * k * n) * 4  # one of [M, K, N] would be 50 MB
    program = jax.jit(transformed.graded(call, range(4))).lower(*arrays(4096)).compile().as_text()
    sizes = [np.prod([int(d) for d in shape.split(",")]) for shape in re.findall(r"\w\d+\[([\d,]+)\]", program)]
    assert max(sizes) <= 4096 * max(k, n)


def test_quantised_matrices_multiply_like_dequantised_ones():
    rng = np.random.default_rng(1)
    lhs, rhs = rng.normal(size=(30, 8)).astype(np.float32), rng.integers(-127, 128, (2, 8, 5)).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, (2, 2, 1, 5)).astype(np.float32)
    got = grouped_matmul(lhs, rhs, jnp.array([9, 21]), rhs_scale=scale)
    want = grouped_matmul_loop.grouped_matmul(lhs, rhs, [9, 21], rhs_scale=scale)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_rows_and_matrices_of_8_bits_multiply_like_dequantised_ones():
    rng, eight = np.random.default_rng(1), jnp.float8_e4m3fn
    lhs, rhs = (jnp.asarray(rng.normal(size=s) * 8, eight) for s in ((30, 16), (2, 16, 5)))
    scales = rng.uniform(0.1, 1, (30, 2)).astype(np.float32), rng.uniform(0.1, 1, (2, 4, 1, 5)).astype(np.float32)
    sizes = jnp.array([9, 18])
    got = grouped_matmul(lhs, rhs, sizes, lhs_scale=scales[0], rhs_scale=scales[1])
    arrays = (np.asarray(x).astype(float) for x in (lhs, rhs))
    want = grouped_matmul_loop.grouped_matmul(*arrays, [9, 18], rhs_scale=scales[1], lhs_scale=scales[0])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
    wide = rhs.astype(jnp.bfloat16)
    np.testing.assert_allclose(
        grouped_matmul(lhs, wide, sizes, lhs_scale=scales[0]),
        grouped_matmul_loop.grouped_matmul(
            np.asarray(lhs).astype(float), np.asarray(wide).astype(float), [9, 18], lhs_scale=scales[0]
        ),
        rtol=1e-5,
        atol=1e-3,
    )


def test_the_output_has_the_dtype_that_was_asked_for():
    lhs, rhs = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((1, 3, 2), jnp.bfloat16)
    sizes = jnp.array([3])
    assert grouped_matmul(lhs, rhs, sizes).dtype == jnp.float32
    assert grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    assert grouped_matmul(lhs[:0], rhs, 0 * sizes).shape == (0, 2)


@pytest.mark.parametrize("split", ["rows", "columns", "both"])
def test_shards_are_parts_of_the_whole(split):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = (None if split == "columns" else "dp"), (None if split == "rows" else "tp")
    rng = np.random.default_rng(1)
    for transposed in (False, True):
        arrays = [rng.normal(size=s).astype(np.float32) for s in ((40, 6), (3, 8, 6), (40, 8), (3, 1, 8))]
        arrays[1] = arrays[1] if transposed else np.swapaxes(arrays[1], 1, 2)
        weights = P(None, columns) if transposed else P(None, None, columns)

        def call(lhs, rhs, existing, bias, transposed=transposed, **options):
            sizes = jnp.array([9, 0, 24])
            return grouped_matmul(lhs, rhs, sizes, None, existing, rhs_bias=bias, transpose_rhs=transposed, **options)

        specs = {"mesh": mesh, "in_specs": (P(rows), weights, P()), "out_specs": P(rows, columns)}
        got = transformed.quickly(transformed.graded(lambda *a: call(*a, **specs), range(4)))(*arrays)  # noqa: B023
        transformed.close(got, transformed.graded(call, range(4))(*arrays), 2e-5, 1e-5)


def test_groups_cannot_be_split_by_a_spec():
    mesh = jax.make_mesh((8,), ("ep",), devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="axis 'e' of rhs cannot be split"):
        grouped_matmul(LHS, RHS, SIZES, mesh=mesh, in_specs=(P(), P("ep"), P()), out_specs=P())


LHS, RHS, SIZES = jnp.zeros((8, 6)), jnp.zeros((2, 6, 4)), jnp.array([3, 5])


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((LHS[0], RHS, SIZES), {}, r"lhs: got shape \(6,\), wants \[M, K\]"),
        ((LHS, RHS[:, :5], SIZES), {}, r"rhs: got shape \(2, 5, 4\), wants \[E, K=6, N\]"),
        ((LHS, RHS, SIZES), {"transpose_rhs": True}, r"rhs: got shape \(2, 6, 4\), wants \[E, N, K=6\]"),
        ((LHS, RHS.astype(jnp.int8), SIZES), {}, "rhs: got .*int8 without rhs_scale, wants a floating dtype"),
        ((LHS, RHS, SIZES[:1]), {}, r"group_sizes: got shape \(1,\), wants \[E=2\]"),
        ((LHS, RHS, SIZES.astype(float)), {}, "group_sizes: got dtype float32, wants an integer dtype"),
        ((LHS, RHS, SIZES, jnp.array([0, 1])), {}, "group_offset: got an array .*, wants an int"),
        ((LHS, RHS, SIZES, None, jnp.zeros((8, 5))), {}, r"existing_out: got shape \(8, 5\), wants \[M=8, N=4\]"),
        ((LHS, RHS, SIZES), {"rhs_bias": jnp.zeros((2, 4))}, r"rhs_bias: got shape \(2, 4\), wants \[E=2, 1=1, N=4\]"),
        (
            (LHS, RHS, SIZES),
            {"rhs_scale": jnp.zeros((2, 4, 1, 4))},
            "rhs_scale: got 4 blocks, wants a divisor of the 6",
        ),
        ((LHS.astype(jnp.float8_e4m3fn), RHS, SIZES), {}, "lhs: got float8_e4m3fn without lhs_scale, wants"),
        ((LHS, RHS, SIZES), {"lhs_scale": jnp.zeros((8, 4))}, "lhs_scale: got 4 blocks, wants a divisor of the 6"),
        ((LHS, RHS, SIZES), {"lhs_scale": jnp.zeros((7, 1))}, r"lhs_scale: got shape \(7, 1\), wants \[M=8"),
        ((LHS, RHS, SIZES), {"left_over": "nan"}, "left_over: got .*nan.*, wants one of 'zero', 'undefined'"),
        ((LHS, RHS, SIZES, None, jnp.zeros((8, 4))), {"left_over": "undefined"}, "left_over: got .* with existing_out"),
        ((LHS, RHS, SIZES), {"preferred_element_type": int}, "preferred_element_type: got .*, wants a floating dtype"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        grouped_matmul(*arguments, **options)


def test_the_class_runs_the_operation():
    matmul = GroupedMatmul()
    np.testing.assert_array_equal(matmul.run(LHS, RHS, SIZES), jnp.zeros((8, 4)))
    assert matmul.op_id == "grouped_matmul"


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 30), min_size=5, max_size=5), offset=st.integers(-2, 5), seed=st.integers(0, 99))
def test_random_groups_match_the_formula(sizes, offset, seed):
    rng = np.random.default_rng(seed)
    lhs, rhs, existing = (rng.normal(size=s).astype(np.float32) for s in ((70, 6), (3, 6, 4), (70, 4)))
    traced = jax.jit(grouped_matmul, static_argnames="cfg")  # there may be more rows in groups than there are
    got = traced(lhs, rhs, jnp.array(sizes), jnp.array([offset]), existing, cfg=TILES)
    want = grouped_matmul_loop.grouped_matmul(lhs, rhs, sizes, offset, existing)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_activations_and_parameters_of_different_precision(dtypes, transpose):
    rows, weights = dtypes
    lhs, rhs = jax.random.normal(jax.random.key(0), (8, 16), rows), jax.random.normal(jax.random.key(1), (2, 16, 4))
    rhs = (rhs.swapaxes(1, 2) if transpose else rhs).astype(weights)
    sizes = jnp.array([3, 5])

    def run(lhs, rhs, **options):
        return grouped_matmul(lhs, rhs, sizes, transpose_rhs=transpose, **options)

    wide = {"preferred_element_type": jnp.float32}
    want = grouped_matmul_loop.grouped_matmul(
        np.asarray(lhs, float), np.asarray(rhs, float), [3, 5], transpose_rhs=transpose
    )
    np.testing.assert_allclose(run(lhs, rhs, **wide), want, rtol=2e-5, atol=2e-5)
    assert run(lhs, rhs).dtype == lhs.dtype
    assert run(lhs, rhs, **wide).dtype == jnp.float32
    gradients = jax.grad(lambda *x: jnp.sum(run(*x, **wide) ** 2), (0, 1))(lhs, rhs)
    wants = jax.grad(lambda *x: jnp.sum(run(*x) ** 2), (0, 1))(lhs.astype(jnp.float32), rhs.astype(jnp.float32))
    for got, want, operand in zip(gradients, wants, (lhs, rhs), strict=True):
        assert got.dtype == operand.dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2e-2, atol=2e-2)


def test_bfloat16_rows_and_float32_matrices_as_the_model_library_calls_it():
    out = grouped_matmul(jnp.ones((8, 16), jnp.bfloat16), jnp.ones((2, 16, 4), jnp.float32), jnp.array([3, 5]))
    np.testing.assert_array_equal(out.astype(jnp.float32), 16)
