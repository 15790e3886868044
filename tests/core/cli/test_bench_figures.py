"""What a benchmark says of its figures: what is compared, how work is counted, how times vary, where they are from."""

import json

import jax
import jax.numpy as jnp
import pytest

from ejkernel.cli import plot
from ejkernel.cli.counts import count_work
from ejkernel.ops import registry

QUICK = ("--repeat", "2")
SMALL = ("flash_attention", "--shape", "1,32,2,16", *QUICK)
GROUPED = ("--shape", "lhs=16,8", "--shape", "rhs=2,8,4", "--shape", "group_sizes=2")
CONVOLUTION = ("--shape", "x=2,16,4", "--shape", "weight=4,3")


def timings(run, *arguments, **expected):
    return json.loads(run("bench", *arguments, "--json", **expected).stdout)["timings"]


@pytest.mark.parametrize(
    ("call", "library"),
    [
        ((*SMALL, "-o", "causal=true", "-o", "sliding_window=(7, 0)"), {"jax.nn", "reference"}),
        ((*SMALL, "-o", "logits_soft_cap=5.0"), {"reference"}),
        (("grouped_matmul", *GROUPED, *QUICK), {"lax", "reference"}),
        (("causal_conv1d", *CONVOLUTION, *QUICK), {"lax", "reference"}),
    ],
    ids=["attention", "soft cap", "grouped", "convolution"],
)
def test_baselines_compute_the_same_call_and_agree_with_it(run, call, library):
    found = timings(run, *call)
    assert {one["implementation"] for one in found} == {"xla"} | library
    assert {one["passes"] for one in found} == {"forward", "forward + backward"}
    assert all(one["check"]["passed"] for one in found)
    assert all(one["seconds"] > 0 and one["spread"] >= 0 for one in found)


def test_baselines_can_be_left_out(run):
    assert {one["implementation"] for one in timings(run, *SMALL, "--no-baselines")} == {"xla"}


def lowered(name, **given):
    op = registry().op(name)
    record = op.lower(op.arguments(**given))
    return op.family, record, jax.eval_shape(lambda record: op.family.reference(record)[0], record)


def test_flops_exclude_pairs_outside_the_window():
    x = jnp.ones((1, 4, 2, 8), jnp.float32)
    family, record, out = lowered("flash_attention", query=x, key=x, value=x, causal=True, sliding_window=(1, 0))
    forward = count_work(family, record, "forward", out)
    assert forward.flops == 2 * (8 + 8) * (1 + 2 + 2 + 2) * 2
    assert forward.size == 4 * x.nbytes
    assert "7 pairs" in forward.text
    both = count_work(family, record, "forward + backward", out)
    assert both.flops == 3.5 * forward.flops
    assert "2.5 forward passes" in both.text


def test_flops_exclude_unassigned_rows():
    arrays = {"lhs": jnp.ones((16, 8)), "rhs": jnp.ones((2, 8, 4)), "group_sizes": jnp.array([3, 4], jnp.int32)}
    family, record, out = lowered("grouped_matmul", **arrays)
    assert count_work(family, record, "forward", out).flops == 2 * 7 * 8 * 4


def test_uncounted_flops_have_no_rate(run):
    case = registry().op("page_attention").cases[0].name
    found = timings(run, "page_attention", "--case", case, *QUICK)
    assert {one["tflop_per_s"] for one in found} == {one["gb_per_s"] for one in found} == {None}
    assert "not counted" in found[0]["count"]["text"]


def test_the_table_states_rates_their_count_device_and_versions(run):
    output = run("bench", *SMALL).output
    for words in ("TFLOP/s", "GB/s", "spread", "on cpu; ejkernel 0.2.0, jax ", "FLOP: 2 * (D + Dv) per head and"):
        assert words in output


def test_a_sweep_sets_every_axis_that_is_named_and_draws_lines(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda self, path, **kwargs: drawn.append(self))
    found = timings(run, *SMALL, "--sweep", "t,s=16,32", "--plot", str(tmp_path / "x.png"))
    assert {one["at"] for one in found} == {16, 32}
    assert {one["call"].split(", value")[0] for one in found if one["at"] == 16} == {
        "query float32[1,16,2,16], key float32[1,16,2,16]"
    }
    (figure,) = drawn
    assert "flash_attention on cpu; ejkernel 0.2.0, jax " in figure.get_suptitle()
    assert all(axis.get_legend() is None for axis in figure.axes)
    assert len(figure.legends) == 1
    assert [axis.get_xlabel() for axis in figure.axes] == ["size of t, s"] * 2


def test_bars_have_no_legend_and_a_title_with_device_and_versions(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda self, path, **kwargs: drawn.append(self))
    run("bench", *SMALL, "--plot", str(tmp_path / "x.png"))
    (figure,) = drawn
    assert "flash_attention on cpu; ejkernel 0.2.0, jax " in figure.get_suptitle()
    assert not figure.legends
    assert all(axis.get_legend() is None for axis in figure.axes)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("t", "wants axis letters and sizes"),
        ("=3", "wants axis letters"),
        ("t=0", "wants axis"),
        ("z=8", "no given array"),
    ],
)
def test_an_invalid_sweep_is_a_one_line_error(run, sweep, message):
    output = run("bench", *SMALL, "--sweep", sweep, status=2).output
    assert message in output
    assert "Traceback" not in output


def test_a_sweep_needs_shapes(run):
    assert "--sweep needs" in run("bench", "flash_attention", "--case", "causal", "--sweep", "t=8", status=2).output
