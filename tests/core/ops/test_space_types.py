"""Configurations belong to kernels: their own types are stored, and public fields are translated."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import own_types
import pytest
import toy
from own_types import OwnBackward, OwnForward
from toy import ToyConfig
from toy import toy as call

import ejkernel
from ejkernel.ops import (
    BwdParams,
    ConfigSelectorChain,
    FwdParams,
    Invocation,
    NoImplementationError,
    PersistentCache,
    StoreWarning,
    overlay_cache,
)
from ejkernel.ops.config.table import Entry, entry_config_part
from ejkernel.ops.params import set_fields_as_text

PARTS = {
    "forward": OwnForward(block_rows=4),
    "backward": OwnBackward(block_rows=4, dkv_stages=2),
}


def used(run) -> object:
    start = len(toy.SEEN)
    run()
    (part,) = toy.seen(since=start)
    return part


@pytest.fixture
def own(use):
    return use(own_types.plugin(), toy.plugin(toy.implementation("other", priority=-1), name="other", ops=()))


def test_kernel_config_types_are_read_from_the_store_by_another_process(own, store, x):
    chain = ConfigSelectorChain(persistent=PersistentCache(store))
    for direction in PARTS:
        request = toy.request(chain, x, direction)
        chain.store(request.key(), PARTS[direction], 1.0, "")
    script = Path(own_types.__file__)
    done = subprocess.run([sys.executable, str(script), str(store)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"persistent {part}" for part in PARTS.values()], done.stderr
    assert "damaged" not in done.stderr


def test_public_fields_set_kernel_fields_and_the_heuristic_sets_the_others(own, x, chain):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=2))
    assert used(lambda: call(x, cfg=cfg, chain=chain)) == OwnForward(block_rows=2)


def test_a_public_field_that_a_kernel_does_not_read_has_no_effect_on_it(own, x, chain):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=2, kv_blocksize=4))
    assert used(lambda: call(x, cfg=cfg, chain=chain)) == OwnForward(block_rows=2)
    assert "kv_blocksize: no effect, own does not read it" in str(ejkernel.explain("toy", x, cfg=cfg).forward)


def test_a_config_type_is_accepted_only_by_its_kernel(own, x, chain):
    part = OwnForward(block_rows=1, order="columns")
    assert used(lambda: call(x, cfg=ToyConfig(fwd_params=part), chain=chain)) == part
    with overlay_cache({"toy": ToyConfig(fwd_params=part)}):
        assert used(lambda: call(x, chain=chain)) == part
    with pytest.raises(NoImplementationError, match="BwdParams is a configuration of another kernel"):
        call(x, cfg=ToyConfig(fwd_params=BwdParams(q_blocksize=2)), chain=chain)


def test_candidate_cfgs_are_translated_to_public_configurations(own, x):
    configs = toy.Toy().candidate_cfgs(Invocation("toy", (x,)))
    backwards = [config.bwd_params for config in configs]
    assert BwdParams(q_blocksize=4, num_stages=2) in backwards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    rows: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLoops:
    dkv: Loop
    dq: Loop


LOOPS = TwoLoops(dkv=Loop(rows=8, stages=2), dq=Loop(rows=16, stages=2))


@pytest.fixture
def loops():
    return dataclasses.replace(
        own_types.SPACE,
        backward=TwoLoops,
        heuristic=lambda record, device, direction: LOOPS,
        public_fields={"q_blocksize": ("dkv.rows", "dq.rows"), "num_stages": ("dkv.stages", "dq.stages")},
    )


def test_a_public_field_sets_all_nested_config_fields_it_maps_to(loops):
    found = loops.complete_part(LOOPS, BwdParams(q_blocksize=4), "backward")
    assert found == TwoLoops(dkv=Loop(rows=4, stages=2), dq=Loop(rows=4, stages=2))
    assert loops.unread_fields(BwdParams(q_blocksize=4, kv_blocksize=4), "backward") == ["kv_blocksize"]
    assert loops.part_in_public_fields(ToyConfig, found, "backward") == BwdParams(q_blocksize=4, num_stages=2)
    assert loops.part_in_public_fields(ToyConfig, LOOPS, "backward") == LOOPS


def test_nested_config_fields_round_trip_and_unknown_ones_are_damage():
    entry = Entry({"dkv": {"rows": 8, "stages": 2}, "dq": {"rows": 16, "stages": 2}}, 1.0)
    assert entry_config_part(entry, TwoLoops, "there") == LOOPS
    strange = Entry({**entry.config, "dq": {"rows": 16, "stages": 2, "warps": 4}}, 1.0)
    with pytest.warns(StoreWarning, match=r"no field dq\.warps"):
        assert entry_config_part(strange, TwoLoops, "there") is None
    assert set_fields_as_text(LOOPS) == "dkv.rows=8, dkv.stages=2, dq.rows=16, dq.stages=2"
