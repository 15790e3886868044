"""Every recipe has an original layer, and calls public operations alone."""

from pathlib import Path

import pytest
from tests.models.checking import FAMILIES, called_operations

FOLDER = Path(__file__).parent


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
