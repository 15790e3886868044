"""Calls drawn at random, on the device that is there, against what they mean.

    python3 -m ejkernel_conformance.random_calls run --out FOLDER [--calls 2000] [--seed 0] [--op NAME]

A *program* is an operation with sizes, dtypes and options, from the operation's name, the seed and a number; it is
called with several sets of values. Memory that no call may read is NaN or infinity. The implementation that dispatch
chooses is compared with the operation's reference in float64 on the CPU, is called twice for equal bits, and stands
next to XLA in float32 on the same device.
"""
