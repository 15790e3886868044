"""Debug mode of the mask types."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ejkernel.types import MaskInfo, get_debug_mode, set_debug_mode
from ejkernel.types.mask import qkv_masks_to_cu_seqlens

FALLING = [0, 3, 2]


@pytest.fixture(autouse=True)
def _forget_debug_mode(monkeypatch):
    monkeypatch.delenv("EJKERNEL_MASK_DEBUG", raising=False)
    yield
    set_debug_mode(None)


@pytest.mark.parametrize(("word", "on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_environment_is_read_at_every_call(monkeypatch, word, on):
    assert get_debug_mode() is False
    monkeypatch.setenv("EJKERNEL_MASK_DEBUG", word)
    assert get_debug_mode() is on


def test_setting_wins_over_the_environment_until_it_is_taken_back(monkeypatch):
    monkeypatch.setenv("EJKERNEL_MASK_DEBUG", "1")
    set_debug_mode(False)
    assert get_debug_mode() is False
    set_debug_mode(None)
    assert get_debug_mode() is True


def test_lengths_on_a_device_are_always_checked():
    with pytest.raises(ValueError, match=r"cu_seqlens_q must not decrease, got \[0, 3, 2\]"):
        MaskInfo.from_cu_seqlens(jnp.array(FALLING), max_q_len=4)
    with pytest.raises(ValueError, match="cu_seqlens_kv ends at 6"):
        MaskInfo.from_cu_seqlens(jnp.array([0, 3]), max_q_len=4, cu_seqlens_kv=jnp.array([0, 6]))


def test_masks_on_a_device_are_checked_only_in_debug_mode():
    qkv_masks_to_cu_seqlens(jnp.array([[False, True]]))
    set_debug_mode(True)
    with pytest.raises(ValueError, match="q_mask has padding before a valid token"):
        qkv_masks_to_cu_seqlens(jnp.array([[False, True]]))


def test_additive_bias_is_told_from_a_mask():
    bias = jnp.array([[[[0.0, -1e9]]]])
    set_debug_mode(True)
    for make in (MaskInfo.from_attention_mask, lambda mask: MaskInfo(_attention_mask=mask)):
        with pytest.raises(ValueError, match="attention_mask must hold only 0 and 1"):
            make(bias)
        assert make(jnp.array([[[[0.0, 1.0]]]])).attention_mask[0, 0, 0].tolist() == [False, True]


def test_lengths_given_to_replace_are_checked_too():
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 2, 4]), max_q_len=4)
    set_debug_mode(True)
    with pytest.raises(ValueError, match="cu_seqlens_kv must start with 0, got 1"):
        info.replace(cu_seqlens_kv=jnp.array([1, 2, 4]))


def test_traced_values_are_never_read():
    set_debug_mode(True)
    ids = jax.jit(lambda cu: MaskInfo.from_cu_seqlens(cu, max_q_len=4).apply_causal().q_segment_ids)(jnp.array(FALLING))
    assert ids.shape == (1, 4)


def test_import_reads_neither_the_environment_nor_a_device():
    code = (
        "import os\n"
        "class Spy(type(os.environ)):\n"
        "    def get(self, key, default=None):\n"
        "        assert key != 'EJKERNEL_MASK_DEBUG', 'read at import'\n"
        "        return super().get(key, default)\n"
        "os.environ.__class__ = Spy\n"
        "import ejkernel.types\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a device was opened at import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
