"""Lowers the calls of implementations on a machine without their device, so that the programs of two trees can be
compared.

A change of names or of files changes the digest of a kernel's sources, and must leave every program as it is. For each
implementation, each conformance case that it serves on a chip is lowered, alone and with its gradients, and a hash of
the program is kept. `carrying` compares the hashes of two trees.

A program's hash covers what every result is computed from: operations, their attributes and types, and kernels. It does
not cover names of functions, locations, or the order of operations that do not depend on each other. Kernels count as

- the Mosaic GPU module, without locations and with its symbols numbered;
- Triton's TTIR after inlining, with grid, warps, stages and options, from which the compiler makes PTX;
- the target of an FFI call, with its attributes and operands. Of the C++ there are two hashes for each target: one of
  its text, and, where nvcc is installed, one of the machine code of each kernel.

At their top the modules import nothing of ejkernel but each other. The folder runs as a script against the packages
of another tree:

    PYTHONPATH=<packages/*/src of the other tree> python confirm/programs --out before.json --impl triton
"""

from ejkernel_conformance.confirm.programs.calls import GRADIENTS
from ejkernel_conformance.confirm.programs.collect import FORMAT, collect
from ejkernel_conformance.confirm.programs.graph import summary
from ejkernel_conformance.confirm.programs.normalise import normalised
from ejkernel_conformance.confirm.programs.stand_ins import stand_ins

__all__ = ["FORMAT", "GRADIENTS", "collect", "normalised", "stand_ins", "summary"]
