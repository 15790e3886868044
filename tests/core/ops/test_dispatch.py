"""T-6: `platform="auto"` works, a platform nobody serves gives one error with the table, and nothing is ignored."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from toy import toy as call

import ejkernel
from ejkernel.families.tiled_attention import FAMILY, TiledAttention
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import NoImplementationError
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import refusals
from ejkernel.types.arguments import optional_fields

CPU = DeviceInfo(platform="cpu", kind="cpu")


@pytest.fixture
def attention_inputs():
    return [jnp.ones((1, 8, 2, 16))] * 3


def test_platform_auto_equals_no_platform(plain, x, chain):
    assert (call(x, platform="auto", chain=chain) == call(x, chain=chain)).all()


def test_a_platform_without_an_implementation_gives_one_error_with_the_table(plain, x, chain):
    with pytest.raises(NoImplementationError) as caught:
        call(x, platform="triton", chain=chain)

    lines = str(caught.value).splitlines()
    assert lines[:2] == ["no implementation serves this call", "toy forward on cpu:"]
    assert any("plain" in line and "platform='triton' was asked for" in line for line in lines)
    assert "  no installed backend has an implementation for platform 'triton'" in lines


def test_flash_attention_on_a_missing_platform_raises_with_refusals(attention_inputs):
    with pytest.raises(NotImplementedError, match=r"xla .* refused .*platform='triton' was asked for"):
        flash_attention(*attention_inputs, platform="triton")


def test_an_operation_without_any_implementation_raises_and_says_so(use, x, chain):
    use(toy.plugin())

    for platform in (None, "auto", "xla"):
        with pytest.raises(NoImplementationError, match="toy forward on cpu"):
            call(x, platform=platform, chain=chain)


def test_an_unknown_platform_raises_value_error(plain, x, chain):
    with pytest.raises(ValueError, match=r"platform: got 'tritno', wants one of 'triton'"):
        call(x, platform="tritno", chain=chain)


def some_value(field: dataclasses.Field, default: object) -> object:
    """A value that differs from a field's default."""
    if not field.metadata.get("static"):
        return jnp.zeros((1,))
    return not default if isinstance(default, bool) else "other"


@pytest.mark.parametrize("name", optional_fields(TiledAttention))
def test_every_optional_argument_that_is_not_handled_is_refused_by_name(use, name):
    grudging = toy.implementation(handles=frozenset())
    fields = {f.name: f for f in dataclasses.fields(TiledAttention)}
    array = jnp.ones((1, 8, 2, 16))
    record = TiledAttention(
        query=array,
        key=array,
        value=array,
        softmax_scale=1.0,
        **{name: some_value(fields[name], optional_fields(TiledAttention)[name])},
    )

    reasons = list(refusals(FAMILY, grudging, record, CPU, "auto", "forward", frozenset()))

    assert reasons == [f"{name} is not handled"]


@pytest.mark.parametrize(("options", "name"), [({"power": 3}, "power"), ({"scale": 2.0}, "scale")])
def test_a_call_goes_to_an_implementation_that_handles_all_its_arguments(use, x, chain, options, name):
    grudging = toy.implementation("grudging", handles=frozenset(), priority=9)
    use(toy.plugin(grudging, toy.implementation("able")))
    toy.SEEN.clear()

    call(x, chain=chain)
    call(x, chain=chain, **options)

    assert [implementation for implementation, *_ in toy.SEEN] == ["grudging", "able"]
    assert f"{name} is not handled" in str(ejkernel.explain("toy", x, **options))


def test_a_missing_gradient_is_refused_at_the_call(use, x, chain):
    use(toy.plugin(toy.implementation(gradients=frozenset({"x"}))))

    with pytest.raises(NoImplementationError, match="gives no gradient for bias"):
        jax.grad(lambda bias: call(x, bias, chain=chain).sum())(x)


def test_explain_has_a_line_for_each_implementation_and_each_broken_plugin(use, x):
    def broken():
        raise ImportError("libfoo.so is missing")

    use(
        toy.plugin(
            toy.implementation("best", priority=2),
            toy.implementation("second"),
            toy.implementation("a_name_of_more_than_16_letters", devices=frozenset({"tpu"})),
        ),
        toy.entry_point("sick", broken),
    )
    lines = str(ejkernel.explain("toy", x)).splitlines()

    for direction in ("forward", "backward"):
        start = lines.index(f"toy {direction} on cpu:")
        table = lines[start + 1 : start + 5]
        assert [line.split()[0] for line in table] == ["best", "a_name_of_more_than_16_letters", "second", "plugin"]
        assert len({line.index("priority") for line in table[:3]}) == 1
        assert [line.split()[4] for line in table[:3]] == ["chosen", "refused", "usable"]
        assert "needs tpu, this is cpu" in table[1]
        assert table[3] == "  plugin sick (sick-dist 1.0) not loaded: ImportError: libfoo.so is missing"
    assert sum("heuristics: the implementation's rule" in line for line in lines) == 2


def test_explain_shows_the_reason_of_a_priority(use, x):
    def reason(record, device, direction):
        return f"{len(record.x)} rows, {direction}" if device.platform == "cpu" else ""

    use(
        toy.plugin(
            toy.implementation("long", priority=2, priority_reason=reason),
            toy.implementation("absent", devices=frozenset({"tpu"}), priority_reason=reason),
        )
    )
    long, absent = ejkernel.explain("toy", x).forward.verdicts

    assert long.remarks == f"{len(x)} rows, forward"
    assert (absent.remarks, absent.priority_reason) == ("needs tpu, this is cpu", "")


def test_explain_accepts_an_operations_function_class_or_name(attention_inputs):
    decisions = {str(ejkernel.explain(what, *attention_inputs)) for what in
                 (flash_attention, FlashAttention, FlashAttention(), "flash_attention")}  # fmt: skip

    assert len(decisions) == 1


def test_explain_runs_and_measures_nothing(plain, x):
    toy.SEEN.clear()
    ejkernel.explain("toy", jax.ShapeDtypeStruct(x.shape, x.dtype))

    assert toy.SEEN == []
