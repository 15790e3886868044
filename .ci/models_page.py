"""The page "Models": each recipe of `tests/models`, what it calls, and how far it is from the original layer."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Models

How to port the mixing layer of a model: attention, a recurrence, or experts. Each recipe uses public calls alone and
takes the weights by the names of the checkpoint. Tests compare it, in float32, with the layer of
[transformers](https://github.com/huggingface/transformers): the output, the gradients of the input and of every weight,
packed sequences, and decoding token by token with a cache; of a model that serves requests, the tokens it generates.
A layer that several models share is listed once, at the end.
Errors are parts of the largest entry; this page measured them when it was built.
"""


def models_page() -> str:
    """The page in Markdown. Runs every recipe, which takes a minute."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.models.checking import CHECKS, FAMILIES, called_operations, error, recipe, shared_layers

    rows, recipes, layers = [], [], set()
    for family in FAMILIES:
        module = recipe(family)
        source = (ROOT / "tests/models/recipes" / f"{family}.py").read_text(encoding="utf-8")
        cells = [_largest(CHECKS[name](family), error) if hasattr(module, name) else "" for name in CHECKS]
        title = (ast.get_docstring(ast.parse(source)) or family).partition(":")[0].rstrip(".")
        calls = " ".join(f"`{name}`" for name in called_operations(family))
        layers |= set(shared_layers(family))
        rows.append(f"| [{title}](#{family.replace('_', '-')}) | {calls} | {' | '.join(cells)} |")
        recipes.append(f"## {family.replace('_', '-')}\n\n`{module.SOURCE}`\n\n{_listing(source)}")
    recipes.append("## Layers that recipes share\n")
    recipes += [
        f"`recipes/shared/{path.name}`\n\n{_listing(path.read_text(encoding='utf-8'))}" for path in sorted(layers)
    ]
    head = "| model | calls | value and gradients | packed | decoding | generation |\n|---|---|---|---|---|---|"
    return "\n".join([INTRODUCTION, head, *rows, "", *recipes])


def _largest(pairs: dict, error) -> str:
    return f"{max(error(got, want) for got, want in pairs.values()):.0e}"


def _listing(source: str) -> str:
    return f"```{{.python .no-test}}\n{source}```\n"
