"""How often rings send arrays."""

import jax


def count_sends(jaxpr, times=1):
    """Returns how often a program sends an array, those in loops as often as they go around."""
    found = 0
    for equation in jaxpr.eqns:
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        found += times if equation.primitive.name == "ppermute" else 0
        for one in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            body = getattr(one, "jaxpr", one)
            found += count_sends(body, inner) if hasattr(body, "eqns") else 0
    return found


def assert_fewest_sends(sends):
    """Checks a ring that counts what its forward pass sends: `sends(devices, **options)` of 64 tokens."""
    keys = 2  # arrays that travel
    assert sends(8) == keys * 7
    # A causal ring also exchanges both halves of query, key and value, and of output and lse afterwards.
    assert sends(8, causal=True) == keys * 7 + 2 * 5
    # Parts are of 8: a window of 8 reaches into the part before, one of 9 into that before it.
    assert sends(8, causal=True, sliding_window=(8, 0)) == keys * 1
    assert sends(8, causal=True, sliding_window=(9, 0)) == keys * 2
    assert sends(8, sliding_window=(8, 9)) == keys * 3
    assert sends(8, sliding_window=(0, 0)) == 0
