"""Each notebook has the text and the code of its page, whose code the tests of the documentation execute."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOW_TO_RENEW = "python .ci/make_notebooks.py"


def test_notebooks_are_those_of_their_pages(tmp_path):
    subprocess.run([sys.executable, ROOT / ".ci/make_notebooks.py", tmp_path], check=True, timeout=900)
    committed = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
    written = sorted(tmp_path.glob("*.ipynb"))
    assert [path.name for path in committed] == [path.name for path in written]
    for one, other in zip(committed, written, strict=True):
        assert one.read_text() == other.read_text(), f"{one.name}: {HOW_TO_RENEW} renews it"
