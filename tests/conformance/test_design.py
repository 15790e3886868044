"""What the covering designs of the suite select, on the cases of one operation."""

from collections import Counter

from ejkernel.ops.plugins import registry
from ejkernel_conformance import design
from ejkernel_conformance.subjects import Subject

OTHERS = ("test_value", "test_gradients", "test_residuals", "test_shapes")
TRANSFORMS = (*OTHERS, *design.IN_ROTATION)


def all_tests_of(name):
    """Every transform on every case of an operation on XLA."""
    found = registry()
    op = found.ops[name]
    [implementation] = [i for i in found.implementations[name] if i.name == "xla"]
    subjects = [Subject(op=op, implementation=implementation, case=case) for case in op.cases]
    return [(transform, subject) for transform in TRANSFORMS for subject in subjects], subjects


def test_the_stronger_design_has_every_case_and_gives_it_some_transforms_in_rotation():
    tests, subjects = all_tests_of("causal_conv1d")
    few, many = set(design.first(tests)), set(design.stronger(tests))
    assert few < many
    chosen = [tests[index] for index in many]
    assert {test for test in chosen if test[0] in OTHERS} == {test for test in tests if test[0] in OTHERS}
    rotated = Counter(subject for transform, subject in chosen if transform in design.IN_ROTATION)
    assert set(rotated) == set(subjects)
    assert min(rotated.values()) == design.TRANSFORMS_PER_CASE
    assert len(many) < 0.75 * len(tests)
    # Cases take different transforms.
    assert len({tests[index][0] for index in many - few} & set(design.IN_ROTATION)) > 3


def test_the_stronger_design_has_pairs_of_arguments_with_each_transform():
    tests, _ = all_tests_of("ring_attention")
    chosen = [tests[index] for index in design.stronger(tests)]

    def shown(pairs):
        return {feature for test in pairs for feature in design.features(*test, paired=True)}

    assert shown(chosen) == shown(tests)
    assert shown(tests[index] for index in design.first(tests)) < shown(tests)


def test_marked_tests_belong_to_both_designs():
    """A test that caught a fault was part of a design only while no other case covered more."""
    tests, _ = all_tests_of("mean_pooling")
    marked = {min(set(range(len(tests))) - set(design.stronger(tests)))}
    have_it = {
        which for which in ("first", "second", "stronger", "rest") if marked <= design.select(which, tests, marked)
    }
    assert have_it == {"first", "stronger"}


def test_what_is_selected_is_divided_without_remainder():
    tests, _ = all_tests_of("mean_pooling")
    selected = {which: design.select(which, tests) for which in ("first", "second", "stronger", "rest")}
    assert selected["first"] | selected["second"] == selected["stronger"]
    assert selected["first"].isdisjoint(selected["second"])
    assert selected["second"] < selected["rest"] == set(range(len(tests))) - selected["first"]
