"""The guides that were promised are there, in the site's navigation, and each has code that is executed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = {
    "training": ("equinox", "flax", "state_space_v2", "kernel_delta_attention", "grouped_matmul"),
    "sharded_training": ("fsdp", "tp", "in_specs", "out_shardings"),
    "recurrent_layers": ("flax", "causal_conv1d", "state_space_v2", "gated_delta_rule", "kernel_delta_attention"),
    "sparse_training": ("lightning_indexer_dense_loss", "lightning_indexer_loss", "token_sparse_attention", "recall"),
    "serving": ("chunked_prefill_paged_decode",),
    "remat": ("save_only_these_names",),
    "fleet": ("save_recorded", "import"),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_shows_in_executed_code_what_it_is_about(guide):
    text = (ROOT / "docs" / f"{guide}.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert "assert " in code or "print(" in code
    for word in GUIDES[guide]:
        assert word in code
    assert f": {guide}.md\n" in (ROOT / "mkdocs.yml").read_text()


def test_the_libraries_of_the_guides_are_installed_for_the_tests():
    text = (ROOT / "pyproject.toml").read_text()
    for library in ("equinox", "flax", "optax"):
        assert f'    "{library}>=' in text


@pytest.mark.parametrize(
    ("guide", "example", "count"), [("recurrent_layers", "layers", 10), ("sparse_training", "sparse_attention", 14)]
)
def test_the_classes_and_functions_of_a_guide_are_those_of_its_example(guide, example, count):
    example = (ROOT / "examples" / f"{example}.py").read_text()
    text = (ROOT / "docs" / f"{guide}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = [(block, part) for block in blocks for part in ast.parse(block).body if hasattr(part, "body")]
    classes = [ast.get_source_segment(*x) for x in shown if isinstance(x[1], ast.ClassDef | ast.FunctionDef)]
    assert len(classes) == count
    assert all(code in example for code in classes)
