"""The CUDA kernel of the chunked delta rule on the host: its numbers, what is refused, and where it comes first."""

import ctypes
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import (
    LinearRecurrence,
    final_states_shape,
    has_decay_per_channel,
    num_state_heads,
    reference,
)
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.model import load_object
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_cuda import channel_gates, delta_rule
from ejkernel_cuda.channel_gates.backward import backward as channel_backward
from ejkernel_cuda.channel_gates.forward import forward as channel_forward
from ejkernel_cuda.delta_rule.backward import backward as head_backward
from ejkernel_cuda.delta_rule.backward import num_head_slices, shares_queries_and_keys, sums_pairs_of_heads
from ejkernel_cuda.delta_rule.forward import forward as head_forward
from ejkernel_cuda.delta_rule.plan import (
    chunk_table,
    chunks_before_an_empty_segment,
    num_chunks,
    num_segments,
    num_segments_without_scan,
    starting_states,
)

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
B200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0)
DELTA, PLAIN = delta_rule.IMPLEMENTATIONS
[CHANNELS] = channel_gates.IMPLEMENTATIONS

FIELDS = ("query", "key", "value", "decay", "beta", "initial_state", "sequence_state", "dt", "skip")

PACKED = (3, 3, 80, 150, 150, 210, 290)

REPLACED = {
    "extern __shared__ __align__(1024) char memory[];": "char* memory = device::current->block->shared;",
    'asm volatile("" : "+r"(warp), "+r"(lane), "+r"(t), "+r"(g));': "",
    'asm volatile("" : "+l"(at));': "",
}


@pytest.fixture(scope="module")
def host(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    library = compile_on_host("delta_rule", REPLACED)
    names = ("delta_rule", "delta_rule_reverse", "delta_rule_token_gradients", "delta_rule_group_gradients")
    for name in (
        *names,
        "row_states",
        "row_states_reverse",
        "channel_prepare",
        "channel_scan",
        "channel_scan_reverse",
        "channel_token_gradients",
    ):
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
    return library


def make(
    gates,
    tokens,
    *,
    batch=1,
    heads=1,
    query_heads=None,
    key_heads=None,
    values=64,
    channels=1,
    state=False,
    delta=True,
    dt=False,
    packed=None,
):
    """A record in bfloat16 with float32 gates: none, mild, strong, or -inf for some tokens; dt also brings a skip."""
    keys = iter(jax.random.split(jax.random.key(tokens), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    query, key = normal(batch, tokens, query_heads or heads, 128), normal(batch, tokens, key_heads or heads, 128)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    value, beta = normal(batch, tokens, heads, values), jax.nn.sigmoid(normal(batch, tokens, heads))
    decay = None if gates == "none" else jax.nn.log_sigmoid(normal(batch, tokens, heads, channels))
    if gates == "mild":
        decay = decay / 16
    if gates == "-inf":
        decay = jnp.where(normal(*decay.shape) > 1.5, -jnp.inf, decay)
    query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
    initial = normal(batch, heads, 128, values) if state else None
    fields = {"decay": decay, "initial_state": initial} | ({"beta": beta} if delta else {})
    if dt:
        fields |= {"dt": beta, "skip": normal(1, 1, heads)}
    if packed:
        states = normal(len(packed) - 1, heads, 128, values) if state else None
        fields |= {"cu_seqlens": jnp.array(packed), "sequence_state": states, "initial_state": None}
    return LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.1, **fields)


def call(function, record, *arrays, slices=1, segments=1):
    """Calls a kernel with arrays, or None for those that are absent, and the sizes of a record."""
    arrays = [None if x is None else np.array(x) if isinstance(x, jax.Array) else x for x in arrays]
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))
    fields = (record.query, record.key, record.value)
    sizes = (*record.query.shape[:2], num_state_heads(record), *(x.shape[2] for x in fields), record.value.shape[3])
    sizes += (slices, segments)
    assert function(pointers, (ctypes.c_int * len(sizes))(*sizes), record.softmax_scale) is None


def bfloat16(*shape):
    return np.full(shape, 0xFFFF, np.uint16)


def float32(*shape):
    return np.full(shape, np.nan, np.float32)


def as_float64(x):
    return np.asarray(x.view(jnp.bfloat16) if x.dtype == np.uint16 else x, np.float64)


def prepare(host, record):
    """What the scans read with gates per key channel: q E, k F, k E, A, T and E of the last tokens."""
    (batch, tokens), heads, chunks = record.query.shape[:2], num_state_heads(record), num_chunks(record)
    results = [bfloat16(batch, tokens, heads, 128) for _ in range(3)]
    results += [bfloat16(batch, heads, chunks, 64, 64) for _ in range(2)] + [float32(batch, heads, chunks, 128)]
    call(host.channel_prepare, record, record.query, record.key, record.decay, record.beta, *results)
    return results


def set_table(host, record):
    """Gives the kernels the chunks of a record, and returns the number of its sequences."""
    table = host.chunk_table = np.asarray(chunk_table(record))  # kept while the kernels read it
    sequences = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    host.set_table(table.ctypes.data_as(ctypes.c_void_p) if table.size else None, num_chunks(record), sequences)
    return sequences


def run(host, record, stored=(None, None), segments=1):
    """Output and final states of a record; writes and states go to `stored`."""
    (batch, tokens), heads, values = record.query.shape[:2], num_state_heads(record), record.value.shape[3]
    sequences = set_table(host, record)
    output, final = bfloat16(batch, tokens, heads, values), float32(sequences, heads, 128, values)
    starts = starting_states(record)
    if has_decay_per_channel(record):
        operands = (*prepare(host, record), record.value, record.beta, starts)
        call(host.channel_scan, record, *operands, output, final, *stored, segments=segments)
    else:
        operands = (record.query, record.key, record.value, record.decay, record.beta, starts)
        call(host.delta_rule, record, *operands, output, final, *stored, record.dt, record.skip, segments=segments)
    return as_float64(output), final


def run_gradients(host, record, cotangent, final_cotangent, slices=1, segments=1):
    """The gradients of a record's fields."""
    (batch, tokens), heads, values = record.query.shape[:2], num_state_heads(record), record.value.shape[3]
    sequences = set_table(host, record)
    states_shape, has_delta = (batch, heads, num_chunks(record), values, 128), record.beta is not None
    writes, states = bfloat16(batch, tokens, heads, values) if has_delta else None, bfloat16(*states_shape)
    run(host, record, (writes, states), segments)
    dwrites, dstates = bfloat16(*cotangent.shape), bfloat16(*states_shape)
    dinitial = float32(sequences, heads, 128, values)
    operands = (record.query, record.key, cotangent, record.decay, record.beta, final_cotangent)
    # The gradient of the output, which is in the place of the values, has as many heads as the call.
    reverse_record = dataclasses.replace(record, value=cotangent)
    per_channel = has_decay_per_channel(record)
    if per_channel:
        operands = (*prepare(host, record), cotangent, record.beta, final_cotangent)
        results = (dwrites, dstates, dinitial)
        call(host.channel_scan_reverse, reverse_record, *operands, *results, segments=segments)
    else:
        results = (dwrites, dstates, dinitial, record.dt, record.skip)
        call(host.delta_rule_reverse, reverse_record, *operands, *results, segments=segments)
    if shares_queries_and_keys(record) and not per_channel:
        gradients = run_group_gradients(host, record, cotangent, states, dstates, slices)
        return gradients | {"value": as_float64(dwrites), "initial_state": dinitial, "sequence_state": dinitial}
    summed_heads = 2 if sums_pairs_of_heads(record) and not per_channel else 1
    stored_heads = heads // summed_heads
    fields = {
        name: bfloat16(*x.shape) if x.shape[2] == stored_heads else float32(batch, tokens, stored_heads, 128)
        for name, x in (("query", record.query), ("key", record.key))
    }
    fields |= {"value": bfloat16(*record.value.shape), "beta": float32(2 if per_channel else 1, batch, tokens, heads)}
    decay_shape = (batch, tokens, heads, 128 if per_channel else 1)
    writes = record.value if writes is None else writes
    operands = (record.query, record.key, record.value, writes, cotangent, dwrites, states, dstates)
    decay, beta = float32(*decay_shape), fields["beta"]
    function = host.channel_token_gradients if per_channel else host.delta_rule_token_gradients
    results = (fields["query"], fields["key"], fields["value"], decay, beta)
    call(function, record, *operands, record.decay, record.beta, *results, slices=summed_heads)
    fields |= {"decay": decay, "beta": beta.sum(0)}
    fields["value"] = fields["value"] if has_delta else dwrites
    gradients = {name: as_float64(x) for name, x in fields.items()}
    for name in ("query", "key"):
        shape = getattr(record, name).shape
        gradients[name] = gradients[name].reshape(*shape[:3], -1, 128).sum(3)
    return gradients | {"initial_state": dinitial, "sequence_state": dinitial}


def run_group_gradients(host, record, cotangent, states, dstates, slices):
    """The gradients of fields that a group of heads shares, and of gates, dt and skip."""
    (batch, tokens, groups), heads = record.query.shape[:3], num_state_heads(record)
    make = bfloat16 if slices == 1 else float32
    fields = {name: make(batch, tokens, groups * slices, 128) for name in ("query", "key")}
    for name, shape in (("decay", (tokens, heads, 1)), ("dt", (tokens, heads)), ("skip", (num_chunks(record), heads))):
        fields[name] = None if getattr(record, name) is None else float32(batch, *shape)
    operands = (record.query, record.key, record.value, cotangent, states, dstates, record.decay, record.dt)
    call(host.delta_rule_group_gradients, record, *operands, *fields.values(), slices=slices)
    gradients = {name: as_float64(x) for name, x in fields.items() if x is not None}
    for name in ("query", "key"):
        gradients[name] = gradients[name].reshape(batch, tokens, groups, slices, 128).sum(3)
    if record.skip is not None:
        gradients["skip"] = gradients["skip"].sum((0, 1), keepdims=True)
    return gradients


def error(got, want):
    want = np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("gates", "tokens", "options"),
    [
        ("none", 64, {}),
        ("mild", 300, {"state": True}),
        ("strong", 130, {"batch": 2, "heads": 2, "query_heads": 1, "key_heads": 1, "values": 128}),
        ("-inf", 65, {"heads": 2, "key_heads": 1, "state": True}),
        ("strong", 130, {"values": 128, "state": True, "delta": False}),
        ("mild", 130, {"heads": 2, "query_heads": 1, "key_heads": 1, "delta": False, "dt": True}),
        ("strong", 200, {"channels": 128, "state": True}),
        ("-inf", 65, {"channels": 128, "heads": 2, "query_heads": 1, "key_heads": 1, "values": 128}),
        ("-inf", 200, {"channels": 128, "state": True, "delta": False}),
        ("strong", 450, {"state": True, "delta": False, "segments": 3}),
        ("none", 200, {"state": True, "delta": False, "segments": 2}),
        ("strong", 450, {"channels": 128, "delta": False, "segments": 2}),
        ("mild", 200, {"channels": 128, "state": True, "segments": 2}),
        ("mild", 300, {"packed": PACKED, "state": True, "segments": 2}),
        ("strong", 300, {"packed": PACKED, "delta": False, "segments": 3}),
        ("mild", 300, {"packed": PACKED, "state": True, "channels": 128, "segments": 2}),
        ("strong", 300, {"packed": PACKED, "channels": 128, "delta": False, "segments": 2}),
    ],
)
def test_outputs_and_states_match_the_reference(host, gates, tokens, options):
    options = dict(options)
    segments = options.pop("segments", 1)
    record = make(gates, tokens, **options)
    output, state = run(host, record, segments=segments)
    want_output, want_state = reference(record)[0]
    assert error(output, want_output) < 8e-3
    assert error(state, want_state) < 8e-3


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("gates", "tokens", "options"),
    [
        ("mild", 130, {"state": True, "values": 128}),
        ("-inf", 65, {"heads": 2, "query_heads": 1, "key_heads": 1, "state": True}),
        ("none", 128, {}),
        ("strong", 65, {"heads": 4, "query_heads": 1, "key_heads": 2, "values": 128}),
        ("mild", 130, {"values": 128, "state": True, "delta": False}),
        ("-inf", 65, {"heads": 2, "query_heads": 1, "delta": False}),
        ("mild", 130, {"heads": 5, "query_heads": 1, "key_heads": 1, "state": True, "delta": False, "dt": True}),
        ("-inf", 65, {"heads": 6, "query_heads": 1, "key_heads": 1, "values": 128, "delta": False, "slices": 2}),
        ("none", 64, {"heads": 2, "query_heads": 2, "key_heads": 2, "delta": False, "dt": True}),
        ("strong", 130, {"channels": 128, "state": True, "values": 128}),
        ("-inf", 65, {"channels": 128, "heads": 2, "key_heads": 1}),
        ("mild", 130, {"channels": 128, "state": True, "delta": False}),
        ("strong", 450, {"state": True, "segments": 2}),
        ("-inf", 450, {"state": True, "delta": False, "segments": 3}),
        ("mild", 200, {"state": True, "delta": False, "segments": 2}),
        ("strong", 700, {"channels": 128, "segments": 2}),
        ("-inf", 450, {"channels": 128, "state": True, "delta": False, "segments": 3}),
        ("mild", 300, {"packed": PACKED, "state": True, "segments": 2}),
        ("mild", 300, {"packed": PACKED, "state": True, "delta": False, "segments": 2}),
        ("mild", 300, {"packed": PACKED, "heads": 2, "query_heads": 1, "key_heads": 1, "delta": False, "dt": True}),
        ("mild", 300, {"packed": PACKED, "state": True, "channels": 128, "segments": 2}),
    ],
)
def test_gradients_match_the_reference(host, gates, tokens, options):
    options = dict(options)
    slices, segments = options.pop("slices", 1), options.pop("segments", 1)
    record = make(gates, tokens, **options)
    output, final = jax.eval_shape(lambda r: reference(r)[0], record)
    cotangents = [jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate((output, final))]
    cotangents[0] = cotangents[0].astype(jnp.bfloat16)
    names = [name for name in FIELDS if getattr(record, name) is not None]

    def outputs(fields):
        return reference(dataclasses.replace(record, **fields))[0]

    fields = {name: getattr(record, name).astype(jnp.float32) for name in names}
    [want] = jax.vjp(outputs, fields)[1]((cotangents[0].astype(jnp.float32), cotangents[1]))
    gradients = run_gradients(host, record, *cotangents, slices, segments)
    errors = {name: error(gradients[name], want[name]) for name in names}
    assert max(errors.values()) < 1.5e-2, errors


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("reverse", "gates", "segments"), [(False, "strong", 1), (False, "none", 2), (True, "mild", 2)]
)
def test_row_states_match_the_reference_without_a_scan(host, reverse, gates, segments):
    record = make(gates, 130, batch=2, heads=2, query_heads=1, key_heads=1, delta=False, dt=True)
    table = chunks_before_an_empty_segment(130, segments, reverse=reverse)
    host.set_table(table.ctypes.data_as(ctypes.c_void_p), table.shape[0] - 1, 1)
    cotangent = jax.random.normal(jax.random.key(1), record.value.shape).astype(jnp.bfloat16)
    value, factors = (cotangent, None) if reverse else (record.value, record.dt)
    states = float32(2, segments, 2, 128, 64)
    function, arrays = host.row_states_reverse if reverse else host.row_states, (record.query, record.key, value)
    call(function, record, *arrays, record.decay, factors, None, states, segments=segments + 1)

    def results(begin):
        return reference(dataclasses.replace(record, initial_state=begin))[0]

    (output, want), pull = jax.vjp(results, jnp.zeros((2, 2, 128, 64)))
    if reverse:
        [want] = pull((cotangent.astype(output.dtype), jnp.zeros_like(want)))
    assert error(states[:, -1], want) < 8e-3


@pytest.mark.parametrize(
    ("implementation", "channels", "delta"), [(DELTA, 1, True), (PLAIN, 1, False), (CHANNELS, 128, True)]
)
def test_states_of_rows_are_those_of_any_number_of_columns(monkeypatch, implementation, channels, delta):
    """With the delta rule forward passes give the states after rows, reverse scans the gradients of those before."""
    for module in (head_forward, head_backward, channel_forward, channel_backward):
        monkeypatch.setitem(inspect.unwrap(module).__globals__, "register_handler", lambda name: name)
    record = dataclasses.replace(abstract(2, values=256, channels=channels), initial_state=None)
    record = record if delta else dataclasses.replace(record, beta=None)
    row_states = load_object(implementation.row_states)
    gradient = jax.eval_shape(lambda record: row_states(record, record.value, None), record)
    state = jax.eval_shape(lambda record: row_states(record, None, None), record)
    assert (gradient.shape, gradient.dtype) == ((1, 2, 128, 256), jnp.float32)
    assert state is None if delta else state.shape == gradient.shape


@pytest.mark.parametrize(("tokens", "segments"), [(1, 1), (64 * 257, 1), (64 * 258, 2), (65536, 4)])
def test_segments_without_a_scan_have_the_same_number_of_chunks(tokens, segments):
    """A tile without tokens, in the place of a chunk, is never copied."""
    assert num_segments_without_scan(tokens) == segments
    for reverse in (False, True):
        table = chunks_before_an_empty_segment(tokens, segments, reverse=reverse)
        chunks = -(-tokens // 64)
        scanned = table[-1 - chunks : -1] if reverse else table[:chunks]
        assert (scanned[:, 1] > 0).all()
        assert table[-1, 0] == table.shape[0] - 1 == chunks // segments * (segments + 1)


def abstract(heads, *, batch=1, tokens=8192, keys=128, values=128, channels=1, dtype=jnp.bfloat16):
    """A record of shapes."""
    query, value = (jax.ShapeDtypeStruct((batch, tokens, heads, size), dtype) for size in (keys, values))
    decay = jax.ShapeDtypeStruct((batch, tokens, heads, channels), jnp.float32)
    beta = jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32)
    return LinearRecurrence(query=query, key=query, value=value, softmax_scale=0.1, decay=decay, beta=beta)


def refusals(record, device=H200, implementation=DELTA):
    with target_device(device):
        return list(implementation.requires.extra(record))


def test_unsupported_calls_are_refused():
    assert not refusals(abstract(16))
    assert refusals(abstract(16), B200) == ["compute capability 10.0: the kernel is compiled for 9.0 alone"]
    assert refusals(abstract(16, keys=32)) == ["query: got head dimension 32, the kernel wants one of 128"]
    assert refusals(abstract(16, values=96)) == ["value: got head dimension 96, the kernel wants a multiple of 64"]
    [gates] = refusals(abstract(16, channels=128))
    assert "gates per head" in gates
    assert not refusals(abstract(16, channels=128), implementation=CHANNELS)
    assert not refusals(dataclasses.replace(abstract(16, channels=128), beta=None), implementation=CHANNELS)
    [gates] = refusals(abstract(16), implementation=CHANNELS)
    assert gates == "decay: got gates per head or none, the kernel reads gates per key channel"
    [beta] = refusals(dataclasses.replace(abstract(16), beta=None))
    assert "beta: got None" in beta
    assert not refusals(dataclasses.replace(abstract(16), beta=None), implementation=PLAIN)
    shared = dataclasses.replace(abstract(16, values=192), value=abstract(4, values=192).value)
    with target_device(H200):
        assert not list(DELTA.backward_requires.extra(abstract(16, values=192)))
        [values] = DELTA.backward_requires.extra(shared)
        [without_delta] = PLAIN.backward_requires.extra(dataclasses.replace(abstract(16, values=192), beta=None))
    assert without_delta == "value: got head dimension 192, the kernels of gradients want 64 and 128"
    assert values == without_delta.replace("192", "192 of 4 heads that 16 share")
    mixed = make("mild", 64, heads=2, key_heads=1, delta=False, dt=True)
    with target_device(H200):
        [heads] = PLAIN.backward_requires.extra(mixed)
    assert heads == "key: got 1 heads and 2 of queries, the gradients of dt and skip want the same number"


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "groups", "slices"),
    [(8, 8192, 64, 1, 1), (1, 8192, 64, 1, 1), (1, 2048, 64, 1, 4), (2, 2048, 64, 8, 1), (1, 64, 6, 2, 3)],
)
def test_heads_of_a_group_are_split_if_there_are_few_chunks(batch, tokens, heads, groups, slices):
    query = jax.ShapeDtypeStruct((batch, tokens, groups, 128), jnp.bfloat16)
    record = dataclasses.replace(abstract(heads, batch=batch, tokens=tokens), query=query, key=query, beta=None)
    assert num_head_slices(record) == slices


@pytest.mark.parametrize(
    ("implementation", "batch", "tokens", "decay", "first"),
    [
        (DELTA, 1, 65536, True, True),
        (DELTA, 1, 65536, False, False),
        (DELTA, 1, 8192, False, True),
        (DELTA, 2, 65536, False, True),
        (PLAIN, 1, 65536, False, True),
        (CHANNELS, 1, 65536, True, True),
    ],
)
def test_priority_is_below_triton_for_long_rows_without_decay(implementation, batch, tokens, decay, first):
    record = abstract(16, batch=batch, tokens=tokens)
    rank = implementation.priority_for(record if decay else dataclasses.replace(record, decay=None), H200)
    assert (10 < rank < 20) if first else (0 <= rank < 10)


@pytest.mark.parametrize(
    ("heads", "tokens", "segments"), [(16, 65536, 4), (64, 65536, 1), (200, 8192, 1), (2, 1100, 2), (2, 100, 1)]
)
def test_rows_have_segments_for_all_multiprocessors(heads, tokens, segments):
    assert num_segments(abstract(heads, tokens=tokens)) == segments


def test_chunks_of_packed_sequences_begin_with_them():
    record = dataclasses.replace(abstract(1, tokens=300), cu_seqlens=jnp.array(PACKED, jnp.int32))
    table = np.asarray(chunk_table(record))
    count = table[-1, 0]
    padding = 4 * 6 + 3  # is a sequence of its own, with one chunk
    assert table[:count].tolist() == [
        [0, 0, 3, padding],
        [3, 0, 0, 0 * 4 + 3],
        [3, 64, 64, 1 * 4 + 1],
        [67, 13, 13, 1 * 4 + 2],
        [80, 64, 64, 2 * 4 + 1],
        [144, 6, 6, 2 * 4 + 2],
        [150, 0, 0, 3 * 4 + 3],
        [150, 60, 60, 4 * 4 + 3],
        [210, 64, 64, 5 * 4 + 1],
        [274, 16, 16, 5 * 4 + 2],
        [290, 0, 10, padding],
    ]
    assert (table[count:-1] == [0, 0, 0, -1]).all()
    with jax.enable_x64(True):
        assert chunk_table(record).dtype == jnp.int32


def both_passes(forward, backward, start, *cotangent):
    return run_both_passes(forward, backward, dataclasses.replace(start, cotangent=cotangent), None)


def test_the_calls_are_traced_for_every_combination_of_optional_arrays(monkeypatch):
    for module in ("delta_rule.forward", "delta_rule.backward", "channel_gates.forward", "channel_gates.backward"):
        monkeypatch.setattr(f"ejkernel_cuda.{module}.register_handler", lambda name: name)
    record = make("mild", 70, heads=2, key_heads=1, state=True)
    decay, channel_decay = record.decay[:, :1], jnp.zeros((1, 1, 2, 128))
    one_head = {"query": record.query[:, :, :1], "beta": None}
    state_space = one_head | {"dt": record.beta, "skip": jnp.ones((1, 1, 2))}
    transposed = state_space | {"transposed_states": True, "initial_state": record.initial_state.swapaxes(2, 3)}
    initial_states = {"initial_state": None, "sequence_state": jnp.zeros((2, 2, 128, 64))}
    packed = initial_states | {"cu_seqlens": jnp.array([0, 20, 70])}
    packed_fields = (packed, packed | {"decay": channel_decay}, packed | state_space)
    absent_fields = ({}, {"decay": None}, {"initial_state": None}, {"decay": decay}, {"beta": None, "decay": decay})
    channel_fields = ({"decay": channel_decay}, one_head | {"decay": channel_decay})
    for changes in (
        *absent_fields,
        *channel_fields,
        *packed_fields,
        {"query": one_head["query"]},
        one_head,
        {"value": jnp.tile(record.value, (1, 1, 1, 4)), "initial_state": jnp.tile(record.initial_state, (1, 1, 1, 4))},
        state_space,
        state_space | {"decay": None},
        transposed,
    ):
        used = dataclasses.replace(record, **changes)
        per_channel = has_decay_per_channel(used)
        forward = channel_forward if per_channel else head_forward
        backward = channel_backward if per_channel else head_backward
        (output, states), residuals, private = jax.eval_shape(functools.partial(forward, config=None), used)
        assert (output.shape, output.dtype, residuals, private) == (used.value.shape, jnp.bfloat16, (), None)
        state_shape = (1, 2, 64, 128) if used.transposed_states else final_states_shape(used)
        assert (states.shape, states.dtype) == (state_shape, jnp.float32)
        names = frozenset(name for name in FIELDS if getattr(used, name) is not None)
        start = Pullback(record=used, residuals=(), output=None, cotangent=None, grad_fields=names)
        _, gradients = jax.eval_shape(functools.partial(both_passes, forward, backward), start, output, states)
        assert gradients == {
            name: jax.ShapeDtypeStruct(getattr(used, name).shape, getattr(used, name).dtype) for name in names
        }
