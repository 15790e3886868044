"""The terminal picture of a MaskInfo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ejkernel.types import MaskInfo

few = settings(max_examples=30, deadline=None, derandomize=True)


def cells(text, segments=True):
    """The lines of cells, without what stands around them."""
    lines = text.splitlines()[1:]
    return [line.split(" ")[-1] for line in lines[1:-2]] if segments else lines[:-1]


def test_picture_of_a_packed_causal_mask():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1, -1]])).apply_causal()
    assert info.visualize(block_size=1, return_str=True) == (
        "Attention mask (batch=0, head=0, 5 x 5 tokens, 1 x 1 per cell)\n"
        "    00001111--\n"
        "  0 ██········\n"
        "  0 ████······\n"
        "  1 ····██····\n"
        "  1 ····████··\n"
        "pad ··········\n"
        "cells: █ all pairs attend, ▒ some, · none\n"
        "segment ids: queries left, keys above (last base-36 digit); pad, - padding; mix, ? several"
    )


def test_ascii_picture_without_segments_is_printed(capsys):
    info = MaskInfo.from_attention_mask(jnp.tri(4, dtype=bool)[None])
    assert info.visualize(block_size=2, charset="ascii", show_segments=False) is None
    assert capsys.readouterr().out == (
        "Attention mask (batch=0, head=0, 4 x 4 tokens, 2 x 2 per cell)\n"
        "++..\n##++\ncells: # all pairs attend, + some, . none\n"
    )


@few
@given(hnp.arrays(bool, (1, 2, 7, 9)), st.integers(1, 8), st.integers(1, 10))
def test_every_cell_tells_what_its_pairs_do(mask, q_block, kv_block):
    info = MaskInfo(_attention_mask=jnp.asarray(mask))
    text = info.visualize((q_block, kv_block), head=1, charset="ascii", show_segments=False, return_str=True)
    expected = []
    for i in range(0, 7, q_block):
        blocks = (mask[0, 1, i : i + q_block, j : j + kv_block] for j in range(0, 9, kv_block))
        expected.append("".join(2 * ("#" if block.all() else "+" if block.any() else ".") for block in blocks))
    assert cells(text, segments=False) == expected


@few
@given(
    hnp.arrays(np.int32, (1, 8), elements=st.integers(-2, 40)),
    hnp.arrays(np.int32, (1, 6), elements=st.integers(-2, 40)),
    st.integers(1, 3),
)
def test_labels_tell_the_segments_of_every_cell(q_ids, kv_ids, block):
    text = MaskInfo.from_segments(q_ids, kv_ids).visualize(block, charset="ascii", return_str=True)
    ruler, *rows = text.splitlines()[1:-2]

    def label(ids, several, padding, word):
        kinds = {max(int(i), -1) for i in ids}
        return several if len(kinds) > 1 else padding if kinds == {-1} else word(kinds.pop())

    left = [label(q_ids[0, i : i + block], "mix", "pad", str) for i in range(0, 8, block)]
    assert [row.split()[0] for row in rows] == left
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    above = [label(kv_ids[0, j : j + block], "?", "-", lambda i: digits[i % 36]) for j in range(0, 6, block)]
    assert ruler.strip() == "".join(2 * digit for digit in above)


@few
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.integers(1, 90))
def test_picture_fits_the_screen(q_len, kv_len, block, max_rows, max_cols):
    info = MaskInfo(_q_segment_ids=np.zeros((1, q_len), np.int32), _kv_segment_ids=np.zeros((1, kv_len), np.int32))
    drawn = cells(info.visualize(block, max_rows=max_rows, max_cols=max_cols, return_str=True))
    assert 1 <= len(drawn) <= max_rows
    assert {len(line) for line in drawn} <= set(range(1, max_cols + 1))
    assert {mark for line in drawn for mark in line} == {"█"}


def test_picture_keeps_the_blocks_if_it_need_not_fit():
    info = MaskInfo.from_segments(jnp.zeros((1, 100), jnp.int32))
    drawn = cells(info.visualize(1, fit_in_screen=False, return_str=True))
    assert (len(drawn), len(drawn[0])) == (100, 200)


def test_rows_of_the_batch_and_heads_are_chosen():
    mask = np.zeros((2, 2, 2, 2), bool)
    mask[1, 0, 0] = True
    info = MaskInfo(_attention_mask=jnp.asarray(mask))
    pictures = {
        (batch, head): cells(info.visualize(1, batch=batch, head=head, return_str=True))
        for batch in range(2)
        for head in range(2)
    }
    assert pictures.pop((1, 0)) == ["████", "····"]
    assert all(picture == ["····", "····"] for picture in pictures.values())


def test_shared_mask_and_ids_of_another_row():
    ids = jnp.array([[0, 0], [0, 1]])
    info = MaskInfo(_attention_mask=jnp.tri(2, dtype=bool)[None, None], _q_segment_ids=ids, _kv_segment_ids=ids)
    assert cells(info.visualize(1, batch=0, return_str=True)) == ["██··", "████"]
    assert cells(info.visualize(1, batch=1, return_str=True)) == ["██··", "··██"]


def test_traced_mask_is_refused_with_a_clear_sentence():
    with pytest.raises(ValueError, match="needs values, but this MaskInfo is traced; call it outside jit"):
        jax.jit(lambda info: info.visualize())(MaskInfo.from_random(1, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 2}, "batch must be from 0 to 1, got 2"),
        ({"head": -1}, "head must be from 0 to 0, got -1"),
        ({"charset": "emoji"}, "charset must be one of 'unicode', 'ascii', got 'emoji'"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"max_cols": 0}, "max_cols must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        MaskInfo.from_random(2, 4).visualize(**arguments)


def test_drawing_an_empty_info_is_refused_and_a_row_without_tokens_is_not():
    with pytest.raises(ValueError, match="an empty MaskInfo has nothing to draw"):
        MaskInfo().visualize()
    text = MaskInfo.from_segments(jnp.zeros((1, 0), jnp.int32)).visualize(return_str=True)
    assert text.startswith("Attention mask (batch=0, head=0, 0 x 0 tokens")
