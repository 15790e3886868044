"""Configurations belong to kernels: their own types are stored, and public fields are translated or refused by name."""

import subprocess
import sys
from pathlib import Path

import own_types
import pytest
import toy
from own_types import OwnBackward, OwnForward
from toy import ToyConfig
from toy import toy as call

from ejkernel.ops import (
    BwdParams,
    ConfigSelectorChain,
    FwdParams,
    Invocation,
    NoImplementationError,
    PersistentCache,
    overlay_cache,
)

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


def test_own_types_come_back_from_the_store_in_another_process(own, store, x):
    chain = ConfigSelectorChain(persistent=PersistentCache(store))
    for direction in PARTS:
        request = toy.request(chain, x, direction)
        chain.store(request.key(), PARTS[direction], 1.0, "")
    script = Path(own_types.__file__)
    done = subprocess.run([sys.executable, str(script), str(store)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"persistent {part}" for part in PARTS.values()], done.stderr
    assert "damaged" not in done.stderr


def test_public_fields_set_those_of_the_kernel_and_the_rule_the_others(own, x, chain):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=2))
    assert used(lambda: call(x, cfg=cfg, chain=chain)) == OwnForward(block_rows=2)


def test_a_kernel_without_a_field_is_refused_by_its_name_and_one_that_has_it_serves(own, x, chain):
    cfg = ToyConfig(fwd_params=FwdParams(q_blocksize=2, kv_blocksize=4))
    assert used(lambda: call(x, cfg=cfg, chain=chain)) == FwdParams(q_blocksize=2, kv_blocksize=4)
    with pytest.raises(NoImplementationError, match=r"own .* cfg: has no num_stages"):
        call(x, cfg=ToyConfig(fwd_params=FwdParams(num_stages=2)), platform="triton", chain=chain)


def test_only_the_kernel_of_a_type_is_given_it(own, x, chain):
    part = OwnForward(block_rows=1, order="columns")
    assert used(lambda: call(x, cfg=ToyConfig(fwd_params=part), chain=chain)) == part
    with overlay_cache({"toy": ToyConfig(fwd_params=part)}):
        assert used(lambda: call(x, chain=chain)) == part
    with pytest.raises(NoImplementationError, match="BwdParams is a configuration of another kernel"):
        call(x, cfg=ToyConfig(fwd_params=BwdParams(q_blocksize=2)), chain=chain)


def test_objects_show_candidates_as_public_configurations(own, x):
    configs = toy.Toy().candidate_cfgs(Invocation("toy", (x,)))
    backwards = [config.bwd_params for config in configs]
    assert BwdParams(q_blocksize=4, num_stages=2) in backwards
