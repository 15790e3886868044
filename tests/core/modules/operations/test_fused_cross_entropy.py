"""`fused_cross_entropy`: beside a float64 loop, over a vocabulary that is split, its memory, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import fused_cross_entropy

T, D, V = 12, 8, 24


def arrays(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "hidden": jax.random.normal(keys[0], (T, D)),
        "lm_head_weight": jax.random.normal(keys[1], (D, V)),
        "lm_head_bias": jax.random.normal(keys[2], (V,)),
        "targets": jax.random.randint(keys[3], (T,), 0, V).at[3].set(-100),
    }


def loop(logits, targets, *, cap=None, smoothing=0.0, z=0.0, soft=None):
    """Every token's loss, one entry after another, in float64; 0 for targets below 0."""
    losses = []
    for t, row in enumerate(np.asarray(logits, np.float64)):
        row = row if cap is None else cap * np.tanh(row / cap)
        lse = row.max() + np.log(sum(np.exp(x - row.max()) for x in row))
        loss = z * lse**2
        for v, x in enumerate(row):
            q = float(v == targets[t]) if soft is None else float(soft[t, v])
            loss -= ((1 - smoothing) * q + smoothing / row.size) * (x - lse)
        losses.append(loss if targets[t] >= 0 else 0.0)
    return np.array(losses)


@pytest.mark.parametrize(
    "options", [{}, {"cap": 2.0}, {"smoothing": 0.3}, {"z": 0.1}, {"cap": 3.0, "smoothing": 0.1, "z": 0.2}]
)
@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 5, "chunk_strategy": "block"}, {"chunk_size": 7}])
def test_the_losses_are_those_of_a_loop(options, chunks):
    given = arrays()
    logits = given["hidden"].astype(float) @ given["lm_head_weight"] + given["lm_head_bias"]
    names = {"cap": "logit_softcap", "smoothing": "label_smoothing", "z": "z_loss"}
    out = fused_cross_entropy(**given, reduction="none", **chunks, **{names[k]: x for k, x in options.items()})
    want = loop(logits, np.asarray(given["targets"]), **options)
    np.testing.assert_allclose(out.loss, want, rtol=2e-5, atol=2e-5)
    assert out.weight_sum == T - 1


def test_accuracy_counts_weights():
    logits = jnp.eye(4)[jnp.array([0, 1, 2, 3])]
    out = fused_cross_entropy(logits, jnp.array([0, 1, 0, -100]), jnp.array([1.0, 2.0, 3.0, 4.0]))
    assert (out.accuracy, out.weight_sum) == (0.5, 6.0)
    soft = fused_cross_entropy(logits, soft_targets=jnp.full((4, 4), 0.25))
    assert soft.accuracy is None
    assert soft.weight_sum == 4


def test_large_logits_of_a_large_vocabulary_keep_their_digits():
    """Differences of logits of 1e4 and more, and 100,000 small terms, beside float64."""
    logits = 1e4 + 3 * jax.random.normal(jax.random.key(0), (2, 151936))
    out = fused_cross_entropy(logits, jnp.array([5, 70000]), reduction="none")
    wide = np.asarray(logits, np.float64)
    want = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1) - wide[[0, 1], [5, 70000]]
    np.testing.assert_allclose(out.loss, want, atol=2e-3)  # float32 has steps of 1e-3 at 1e4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_those_of_plain_jax(reduction):
    given = arrays()
    targets = given.pop("targets")
    factor = jnp.arange(1.0, T + 1) if reduction == "none" else 1.0

    def ours(given):
        return jnp.sum(factor * fused_cross_entropy(**given, targets=targets, reduction=reduction, z_loss=0.01).loss)

    def plain(given):
        logits = given["hidden"] @ given["lm_head_weight"] + given["lm_head_bias"]
        lse = jax.nn.logsumexp(logits, axis=1)
        loss = lse - jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0] + 0.01 * lse**2
        loss = jnp.where(targets >= 0, loss, 0)
        return jnp.sum(factor * loss) / ((T - 1) if reduction == "mean" else 1)

    got, want = jax.grad(ours)(given), jax.grad(plain)(given)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.05}, {"soft": True, "reduction": "sum"}])
def test_a_vocabulary_over_devices_is_the_whole_one(check_vma, options):
    given, options = arrays(), dict(options)
    if options.pop("soft", False):
        given["soft_targets"] = jax.nn.softmax(jax.random.normal(jax.random.key(7), (T, V)))
        given["targets"] = None
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    split = {"lm_head_weight": PartitionSpec(None, "tp"), "lm_head_bias": PartitionSpec("tp")}
    split["soft_targets"] = PartitionSpec(None, "tp")
    specs = {name: split.get(name, PartitionSpec()) for name in given}

    def parallel(given):
        run = lambda given: fused_cross_entropy(**given, vocab_parallel_axis="tp", **options)  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=check_vma)(given)

    whole = jax.jit(lambda given: fused_cross_entropy(**given, **options))(given)
    got = jax.jit(parallel)(given)
    for name in ("loss", "z_loss", "weight_sum", "accuracy"):
        one, other = getattr(got, name), getattr(whole, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=name)

    floats = {name: given[name] for name in ("hidden", "lm_head_weight", "lm_head_bias")}
    of_whole = jax.grad(lambda floats: fused_cross_entropy(**{**given, **floats}, **options).loss)(floats)
    of_parts = jax.jit(jax.grad(lambda floats: parallel({**given, **floats}).loss))(floats)
    for name, x in of_whole.items():
        np.testing.assert_allclose(of_parts[name], x, rtol=1e-4, atol=1e-6, err_msg=name)


def test_tokens_may_be_split_over_devices():
    given = arrays()
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, none = PartitionSpec("data"), PartitionSpec()
    out = fused_cross_entropy(
        given["hidden"] @ given["lm_head_weight"], given["targets"], mesh=mesh, in_specs=(rows, rows), out_specs=none
    )
    want = fused_cross_entropy(given["hidden"] @ given["lm_head_weight"], given["targets"])
    np.testing.assert_allclose(out.loss, want.loss, rtol=1e-6)
    np.testing.assert_allclose(out.accuracy, want.accuracy, rtol=1e-6)


def test_a_head_that_is_a_function_passes_gradients_to_what_it_closes_over():
    given = arrays()
    head = given.pop("lm_head_weight")
    bias = given.pop("lm_head_bias")

    def ours(head):
        return fused_cross_entropy(**given, lm_head_fn=lambda x: x @ head + bias, chunk_size=5).loss

    def whole(head):
        return fused_cross_entropy(**given, lm_head_weight=head, lm_head_bias=bias).loss

    np.testing.assert_allclose(ours(head), whole(head), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(ours)(head), jax.grad(whole)(head), rtol=1e-5, atol=1e-7)


def test_tokens_to_ignore_may_hold_nan_with_a_function_for_a_head():
    given = arrays()
    head = given.pop("lm_head_weight")
    weights = jnp.ones(T).at[5].set(0)
    mask = jnp.ones(T, bool).at[7].set(False)

    def loss(hidden, head):
        options = {"targets": given["targets"], "weights": weights, "attention_mask": mask, "chunk_size": 5}
        return fused_cross_entropy(hidden=hidden, lm_head_fn=lambda x: x @ head, **options).loss

    poisoned = given["hidden"].at[jnp.array([3, 5, 7])].set(jnp.nan)
    for hidden in (given["hidden"], poisoned):
        gradients = jax.grad(loss, (0, 1))(hidden, head)
        want = jax.grad(loss, (0, 1))(given["hidden"], head)
        jax.tree.map(np.testing.assert_array_equal, gradients, want)
        assert np.isfinite(gradients[1]).all()


def test_targets_of_other_axes_are_refused_with_a_function_for_a_head():
    hidden, targets = jnp.ones((2, 3, D)), jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"targets: got shape \(3, 2\), wants \(2, 3\)"):
        fused_cross_entropy(hidden=hidden, targets=targets, lm_head_fn=lambda x: x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lm_head_fn": jnp.ones((D, V))}, "lm_head_fn: got ArrayImpl, wants a function"),
        ({"lm_head_fn": lambda x: x[0]}, r"lm_head_fn: got logits of shape \(8,\), wants \[2, V\]"),
        (
            {"lm_head_fn": lambda x: x, "targets": jnp.array([D, 0])},
            f"targets: got .*, wants entries from 0 to {D - 1}",
        ),
        ({"lm_head_fn": lambda x: x, "targets": [0, 1]}, r"targets: got list.*, wants an array of shape \(2,\)"),
    ],
)
def test_functions_for_a_head_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fused_cross_entropy(hidden=jnp.ones((2, D)), **{"targets": jnp.zeros(2, jnp.int32), **arguments})


def test_targets_are_checked_before_a_function_for_a_head_runs():
    runs = []

    def head(x):
        jax.debug.callback(lambda: runs.append(1))
        return x

    with pytest.raises(ValueError, match="targets: got"):
        fused_cross_entropy(hidden=jnp.ones((2, D)), targets=jnp.array([D, 0]), lm_head_fn=head, chunk_size=1)
    jax.effects_barrier()
    assert not runs


@pytest.mark.parametrize("strategy", ["vocab", "block", "token"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_logits_in_blocks_that_do_not_divide_the_vocabulary(strategy, reduction):
    """The last block begins early, within the one before it."""
    logits, targets = jax.random.normal(jax.random.key(1), (7, 17)), jnp.arange(7)

    def loss(logits, **chunks):
        return fused_cross_entropy(logits, targets, reduction=reduction, **chunks).loss.sum()

    got = jax.grad(loss)(logits, chunk_size=5, chunk_strategy=strategy)
    np.testing.assert_allclose(got, jax.grad(loss)(logits), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_array_has_all_tokens_and_the_whole_vocabulary(reduction):
    """Beyond arguments and gradients there are a sum in float32 and at most three blocks of logits."""
    tokens, channels, entries, block = 4096, 64, 2048, 128
    hidden, head = (
        jax.ShapeDtypeStruct((tokens, channels), jnp.float32),
        jax.ShapeDtypeStruct((channels, entries), jnp.float32),
    )
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(hidden, head, targets):
        return jnp.sum(
            fused_cross_entropy(
                hidden=hidden,
                lm_head_weight=head,
                targets=targets,
                reduction=reduction,
                chunk_size=block,
                chunk_strategy="token",
            ).loss
        )

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, head, targets).compile()
    text = compiled.as_text()
    assert not re.search(rf"\[{tokens},{entries}\]", text)
    gradients = 4 * (tokens * channels + channels * entries)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * gradients + 3 * 4 * block * entries + 2**20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_only_smoothing_takes_a_second_array_of_logits(smoothing):
    tokens, channels, entries = 256, 64, 4096
    shapes = [(tokens, channels), (channels, entries)]
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(hidden, head, targets):
        options = {"reduction": "none", "label_smoothing": smoothing, "platform": "xla"}
        return fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets, **options).loss

    memory = jax.jit(loss).lower(hidden, head, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < (2.5 if smoothing else 1.5) * 4 * tokens * entries


def test_tokens_to_ignore_may_hold_anything():
    given = arrays()
    poisoned = {**given, "hidden": given["hidden"].at[3].set(jnp.nan)}

    def gradients(given):
        targets = given["targets"]
        return jax.grad(lambda x, w: fused_cross_entropy(hidden=x, lm_head_weight=w, targets=targets).loss, (0, 1))(
            given["hidden"], given["lm_head_weight"]
        )

    for one, other in zip(gradients(given), gradients(poisoned), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_traced_target_that_is_no_entry_makes_the_loss_nan():
    logits, targets = jnp.zeros((3, 4)), jnp.array([0, 9, 1])
    out = jax.jit(lambda targets: fused_cross_entropy(logits, targets, reduction="none"))(targets)
    assert np.isnan(out.loss).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"targets: .*from 0 to 3"):
        fused_cross_entropy(logits, targets)


def test_all_outputs_are_zero_where_every_target_is_ignored():
    out = fused_cross_entropy(jnp.zeros((3, 4)), jnp.full(3, -100))
    assert [float(x) for x in out] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.zeros((T, V))}, "logits: got an array .* with hidden="),
        ({"lm_head_weight": None}, "lm_head_weight: got None with hidden"),
        ({"lm_head_weight": jnp.zeros((D + 1, V))}, "lm_head_weight: got shape"),
        ({"targets": None}, "targets: got NoneType None with soft_targets"),
        ({"targets": jnp.zeros(T)}, "targets: got dtype float32"),
        ({"weights": jnp.zeros(T + 1)}, "weights: got shape"),
        ({"label_smoothing": 1.5}, "label_smoothing: got 1.5"),
        ({"reduction": "average"}, "reduction: got str 'average'"),
        ({"chunk_strategy": "tokens"}, "chunk_strategy: got str 'tokens'"),
        ({"logit_softcap": 0.0}, "logit_softcap: got"),
        ({"lm_head_fn": lambda x: x}, "lm_head_weight: got a value with lm_head_fn"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        fused_cross_entropy(**{**arrays(), **change})
