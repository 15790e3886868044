"""T-8: configurations and calls that differ anywhere have different keys, and equal ones have the same."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import ejkernel
from ejkernel.modules import FlashAttention, FlashAttentionConfig, create_default_executor
from ejkernel.ops import BwdParams, ConfigKey, FwdParams, Invocation
from ejkernel.ops.config.key import schema_hash, signature
from ejkernel.types import MaskInfo

TILES = st.none() | st.integers(1, 3)


def params(kind: type) -> st.SearchStrategy:
    return st.builds(kind, **{field.name: TILES for field in dataclasses.fields(kind)})


CONFIGS = st.builds(
    FlashAttentionConfig,
    platform=st.sampled_from(["auto", "xla", "triton"]),
    backend=st.sampled_from(["any", "gpu"]),
    fwd_params=st.none() | params(FwdParams),
    bwd_params=st.none() | params(BwdParams),
)


@given(CONFIGS, CONFIGS)
def test_configurations_are_equal_exactly_when_all_their_fields_are(one, other):
    assert (one == other) == (one.to_dict() == other.to_dict())
    if one == other:
        assert hash(one) == hash(other)


@given(CONFIGS, st.data())
def test_changing_any_field_changes_hash_and_equality(config, data):
    name = data.draw(st.sampled_from(["fwd_params", "bwd_params"]))
    part = getattr(config, name) or (FwdParams if name == "fwd_params" else BwdParams)()
    field = data.draw(st.sampled_from([f.name for f in dataclasses.fields(part)]))
    changed = dataclasses.replace(config, **{name: dataclasses.replace(part, **{field: 7})})

    assert changed != config
    assert hash(changed) != hash(config)


def test_config_hashes_do_not_concatenate_field_values():
    """Upstream's hash joined the numbers of all fields into one text."""
    moved = [
        FwdParams(q_blocksize=1, kv_blocksize=12),
        FwdParams(q_blocksize=11, kv_blocksize=2),
        FwdParams(num_warps=1),
    ]

    assert len({hash(part) for part in moved}) == len(moved)


@given(CONFIGS)
def test_configurations_survive_json(config):
    assert type(config).from_json(config.to_json()) == config


def test_a_third_partys_platform_survives_json():
    config = FlashAttentionConfig(platform="acme")
    assert FlashAttentionConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("data", [{"fwd": {}}, {"fwd_params": {"qblocksize": 1}}, {"fwd_params": {"q_blocksize": "1"}}])
def test_a_misspelt_field_is_refused(data):
    with pytest.raises(ValueError, match=r"has no field fwd|Expected `int"):
        FlashAttentionConfig.from_dict(data)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "64"])
@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
def test_a_tile_that_is_no_positive_integer_is_refused(kind, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}.q_blocksize: got {value!r}, wants a positive integer"):
        kind(q_blocksize=value)


KEY = ConfigKey(
    op="toy@1", implementation="plain@1.0", direction="forward", device="cpu", schema="0", call="x=float32[4,8]"
)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ConfigKey)])
def test_every_field_of_a_config_key_affects_equality(field):
    changed = dataclasses.replace(KEY, **{field: "other"})

    assert changed != KEY
    assert str(changed) != str(KEY)


def test_a_key_holds_versions_device_and_schema(plain, x, chain):
    key = toy.request(chain, x).key()

    assert key.op == "toy@1"
    assert key.implementation == "plain@1.0"
    assert key.core == ejkernel.__version__
    assert key.device == jax.devices()[0].device_kind
    assert key.schema == schema_hash(FwdParams)
    assert key.call == "x=float32[4,8]"


def test_shipped_config_keys_omit_package_versions():
    newer = dataclasses.replace(KEY, implementation="plain@2.0", core="9.9")

    assert newer.as_shipped_key() == KEY.as_shipped_key()
    assert dataclasses.replace(KEY, schema="1").as_shipped_key() != KEY.as_shipped_key()


def schema_of(**defaults: object) -> str:
    fields = [(name, int | None, dataclasses.field(default=value)) for name, value in defaults.items()]
    return schema_hash(dataclasses.make_dataclass("Part", fields))


def test_schema_hash_depends_on_fields_and_defaults_but_not_docstrings():
    assert schema_of(tile=None) != schema_of(tile=None, warps=None)
    assert schema_of(tile=None) != schema_of(tile=1)
    documented = dataclasses.make_dataclass("Part", [("tile", int | None, None)], namespace={"__doc__": "Words."})
    assert schema_hash(documented) == schema_of(tile=None)


@pytest.mark.parametrize(
    "other",
    [
        {"x": jnp.ones((4, 9))},
        {"x": jnp.ones((4, 8), jnp.bfloat16)},
        {"bias": jnp.ones((4, 8))},
        {"power": 3},
        {"scale": 2.0},
    ],
    ids=str,
)
def test_calls_with_different_shapes_or_options_have_different_signatures(x, other):
    assert signature(toy.ToyArguments(**{"x": x, **other})) != signature(toy.ToyArguments(x=x))


def test_values_do_not_change_a_signature(x):
    assert signature(toy.ToyArguments(x=x, scale=2.0)) == signature(toy.ToyArguments(x=x + 1, scale=3.0))
    assert signature(toy.ToyArguments(x=x)) == signature(toy.ToyArguments(x=jax.ShapeDtypeStruct(x.shape, x.dtype)))


def flash(**options) -> Invocation:
    array = jnp.ones((2, 8, 2, 16))
    return Invocation("flash_attention", (array, array, array), options)


def test_call_keys_differ_for_segment_ids_and_positions_of_one_shape():
    ids = jnp.zeros((2, 8), jnp.int32)
    masks = [
        MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids),
        MaskInfo(q_positions=ids, kv_positions=ids),
    ]

    assert len({flash(mask_info=mask).call_key for mask in masks}) == 2


def test_call_keys_differ_by_static_integer_arguments():
    x = jnp.ones((1, 64, 1, 8))
    calls = [Invocation("native_sparse_attention", (x, x, x, x[..., 0], None, None, n), {}) for n in (1, 2)]

    assert len({call.call_key for call in calls}) == 2


def test_mesh_specs_and_platform_are_part_of_the_key_of_a_call():
    spec, other = PartitionSpec("d"), PartitionSpec(None, "d")
    meshes = [Mesh(jax.devices()[:count], "d") for count in (1, 2)]
    placed = [
        {"mesh": mesh, "in_specs": (specs,) * 3, "out_specs": specs} for mesh in meshes for specs in (spec, other)
    ]
    variants = [{}, {"platform": "xla"}, *placed]
    keys = {flash(**options).call_key for options in variants}

    assert len(keys) == len(variants)
    for options in placed:  # whether they are given as keywords or as fields
        assert dataclasses.replace(flash(), **options).call_key == flash(**options).call_key


def test_an_executor_takes_positional_arguments():
    array = jnp.ones((1, 8, 2, 16))
    executor = create_default_executor(enable_autotuning=False)

    output = executor(FlashAttention(), array, array, array, causal=True, softmax_scale=0.125)

    assert output.shape == array.shape


@pytest.mark.parametrize("method", ["heuristic_cfg", "heuristic_cfg_gpu", "candidate_cfgs"])
def test_heuristics_accept_positional_and_keyword_arguments(method):
    """Upstream's GPU rules read `kwargs["query"]`."""
    if method == "heuristic_cfg_gpu":
        assert FlashAttention().heuristic_cfg_gpu(flash()) is not None
    assert getattr(FlashAttention(), method)(flash())
