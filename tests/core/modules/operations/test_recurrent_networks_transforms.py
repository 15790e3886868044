"""`rnn`, `gru` and `lstm` under JAX's transformations, on eight forced host devices, and what memory they take."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax.sharding import PartitionSpec as P
from recurrent_network_calls import BIASES, EVERYTHING, make, run

KINDS = ("tanh", "gru", "lstm")


@pytest.mark.parametrize(("kind", "directions"), [("tanh", 1), ("gru", 1), ("lstm", 2)])
def test_transforms(kind, directions):
    made = [make(kind, (2, 6, 3, 1, directions, 2), EVERYTHING, seed, np.float32) for seed in (0, 1)]
    names, floats = list(made[0]), range(len(made[0]))
    arrays, others = (
        [*given.values(), jnp.array(lengths)] for given, lengths in zip(made, ([6, 0], [2, 5]), strict=True)
    )

    def call(*values):
        return run(kind, dict(zip(names, values[:-1], strict=True)), values[-1])

    transformed.check_transforms(call, arrays, floats, others)
    transformed.check_no_new_compilations(call, arrays, others)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_split(kind):
    mesh = jax.make_mesh((4,), ("dp",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    arrays = make(kind, (4, 5, 3, 1, 2, 2), EVERYTHING, dtype=np.float32)
    names, lengths = list(arrays), jnp.array([5, 0, 3, 1])
    states = (P(None, "dp"),) * (2 if kind == "lstm" else 1)
    # What the initial states and the lengths are split by follows from x.
    placed = {"mesh": mesh, "in_specs": (P("dp"), P(), P()), "out_specs": (P("dp"), *states)}

    def graded(**options):
        def call(*values):
            return run(kind, dict(zip(names, values, strict=True)), lengths, **options)

        return transformed.quickly(transformed.graded(call, range(len(names))))(*arrays.values())

    transformed.close(graded(**placed), graded())


@pytest.mark.parametrize(("place", "spec", "letter"), [(0, P(None, "dp"), "t"), (2, P(None, None, "dp"), "g")])
def test_tokens_and_units_cannot_be_split(place, spec, letter):
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    arrays = make("lstm", (2, 4, 3, 1, 1, 2), dtype=np.float32)
    specs = tuple(spec if n == place else P() for n in range(3))
    with pytest.raises(ValueError, match=f"axis '{letter}' of .* cannot be split"):
        run("lstm", arrays, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P()))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_linearly_and_gates_are_kept_for_gradients_alone(kind):
    rows, hidden = 4, 32

    def compiled(tokens, graded):
        arrays = make(kind, (rows, tokens, hidden, 1, 1, hidden), BIASES, dtype=np.float32)
        names = list(arrays)

        def call(*values):
            return run(kind, dict(zip(names, values, strict=True)))

        computed = transformed.graded(call, range(len(names))) if graded else call
        return jax.jit(computed).lower(*arrays.values()).compile()

    short, long = (compiled(tokens, True).memory_analysis().temp_size_in_bytes for tokens in (512, 1024))
    assert long <= 2.1 * short
    shapes = re.findall(r"\w\d+\[([\d,]+)\]", compiled(1024, False).as_text())
    assert max(np.prod([int(d) for d in shape.split(",")]) for shape in shapes) <= 1024 * rows * hidden
