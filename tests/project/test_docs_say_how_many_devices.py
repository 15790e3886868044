"""A page whose Python needs several devices gets them itself: a reader has one CPU, and the tests have eight."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count="
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")})
# A mesh of more than one device that JAX has to have: not an AbstractMesh, and not as many as there are.
SEVERAL_DEVICES = re.compile(r"(?<!Abstract)(?:make_mesh|Mesh)\(\((\d+(?:, *\d+)*),?\)|device_count\(\) == (\d+)")


def needs_several_devices(code: str) -> bool:
    return any(
        int(size) > 1 for found in SEVERAL_DEVICES.finditer(code) for size in re.findall(r"\d+", found[1] or found[2])
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_needs_several_devices_asks_for_them_first(page):
    blocks = PYTHON_BLOCK.findall(page.read_text(encoding="utf-8"))
    if any(map(needs_several_devices, blocks)):
        first = blocks[0]
        assert DEVICE_COUNT_FLAG in first
        assert first.index(DEVICE_COUNT_FLAG) < first.index("import jax")


def test_code_that_needs_several_devices_is_recognised():
    assert needs_several_devices('mesh = jax.make_mesh((2, 4), ("a", "b"))')
    assert needs_several_devices("assert jax.device_count() == 8")
    assert not needs_several_devices('mesh = jax.make_mesh((1,), ("a",))')
    assert not needs_several_devices('mesh = jax.sharding.AbstractMesh((8,), ("sp",))')
    assert not needs_several_devices('mesh = jax.make_mesh((len(devices),), ("tp",))')
