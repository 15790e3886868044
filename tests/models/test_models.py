"""Every recipe against the original layer in float32: values, gradients, packed sequences, decoding with a cache."""

from pathlib import Path

import pytest
from tests.models.checking import CHECKS, FAMILIES, called_operations, error, having

FOLDER = Path(__file__).parent
VALUE, GRADIENT = 2e-5, 5e-5
"""Float32 sums in another order differ by about this much of the largest entry."""


@pytest.mark.parametrize(("function", "family"), [(name, family) for name in CHECKS for family in having(name)])
def test_recipe_computes_what_the_original_layer_does(function: str, family: str) -> None:
    for name, (got, want) in CHECKS[function](family).items():
        assert error(got, want) <= (GRADIENT if name.startswith("gradient") else VALUE), name


def test_every_recipe_has_a_fixture_and_every_fixture_a_recipe() -> None:
    recipes, originals = ({x.stem for x in (FOLDER / name).glob("[!_]*.py")} for name in ("recipes", "originals"))
    assert recipes - {"common"} == set(FAMILIES) == originals - {"common"}


@pytest.mark.parametrize("path", sorted((FOLDER / "recipes").rglob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_recipe_calls_nothing_that_is_not_public(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if "ejkernel" in line and line.startswith(("import", "from"))]
    public = tuple(f"from ejkernel.{name} import" for name in ("modules", "types", "quantization"))
    assert imports == [line for line in imports if line.startswith(public)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_calls_an_operation_itself_or_in_a_shared_layer(family: str) -> None:
    assert called_operations(family)
