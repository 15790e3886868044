"""The examples in the docstrings of the helper modules run."""

import inspect
import re
import textwrap

import pytest

from ejkernel import ejgpu, loggings, utils, xla_utils

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.M | re.S)


def examples() -> dict[str, str]:
    """Code by `module.name`."""
    return {
        f"{module.__name__}.{name}": textwrap.dedent(block)
        for module in (ejgpu, loggings, utils, xla_utils)
        for name in module.__all__
        for block in BLOCK.findall(inspect.getdoc(getattr(module, name)) or "")
    }


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name):
    code = examples()[name]
    exec(compile(code, name, "exec"), {})
    assert "import" in code
