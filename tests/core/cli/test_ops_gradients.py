"""The support matrix says of a required argument without a gradient that it is supported, which every one is."""

import json

import pytest

from ejkernel.cli.ops import support_matrix_data
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import optional_fields

pytestmark = pytest.mark.usefixtures("traced_cases")


@pytest.fixture(scope="module")
def every(traced_cases):
    return support_matrix_data(registry())


def test_required_arguments_are_supported_by_every_implementation(every):
    for op in every:
        required = {"query", "key", "value"} - set(optional_fields(registry().ops[op["operation"]].family.record))
        for one in op["implementations"]:
            for name in required & one["fields"].keys():
                assert one["fields"][name] in ("with gradient", "no gradient"), (op["operation"], one["name"], name)


def test_cudnn_supports_a_query_without_its_gradient(every):
    (flash,) = [op for op in every if op["operation"] == "flash_attention"]
    (cudnn,) = [one for one in flash["implementations"] if one["name"] == "cudnn"]
    assert cudnn["fields"]["query"] == "no gradient"
    assert cudnn["fields"]["causal"] == "yes"
    assert cudnn["fields"]["softmax_aux"] == "no"


def test_the_support_matrix_page_explains_its_words(run):
    output = run("ops").output
    words = {
        cell
        for op in json.loads(run("ops", "--json").stdout)
        for one in op["implementations"]
        for cell in one["fields"].values()
    }
    assert words <= {"with gradient", "no gradient", "yes", "no"}
    for word in words:
        assert f"- *{word}*:" in output
