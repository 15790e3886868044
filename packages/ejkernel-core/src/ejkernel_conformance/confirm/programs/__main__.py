"""Writes what the calls of implementations lower to; as a script, those of the tree whose packages are on the path."""

import argparse
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "ejkernel_conformance.confirm.programs"


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes what the calls of implementations lower to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--impl", action="append", default=[], help="these implementations alone")
    parser.add_argument("--op", action="append", default=[], help="these operations alone")
    parser.add_argument("--chip", default="h200", help="a name in ejkernel.ops.device.DEVICES_BY_SHORT_NAME")
    parser.add_argument("--against", type=Path, help="leave out what has the same digest in this file")
    parser.add_argument("--texts", type=Path, help="folder for the programs and kernels as text")
    args = parser.parse_args(arguments)
    if not __package__:
        _prefer_path()
        _load_this_folder()
    collect = importlib.import_module(PACKAGE).collect
    collect(args.out, args.impl, args.op, args.chip, args.against, args.texts)


def _prefer_path() -> None:
    """Lets packages on the path come before those that the environment has in editable form by an import hook."""
    for finder in [x for x in sys.meta_path if "editable" in type(x).__module__]:
        if importlib.machinery.PathFinder.find_spec("ejkernel_cuda"):
            sys.meta_path.remove(finder)


def _load_this_folder() -> None:
    """Imports this folder under its name, whichever tree the rest of its package is of."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None  # the file is next to this one
    assert spec.loader is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])


if __name__ == "__main__":
    main()
