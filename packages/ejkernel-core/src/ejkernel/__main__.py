"""`python -m ejkernel`: the `ejkernel` command, where scripts are not on the path."""

from ejkernel.cli import main

main(prog_name="ejkernel")
