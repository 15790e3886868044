"""Compiles kernels for a named chip, on a machine that need not have it.

with launch.collect_launches() as launches:
    jax.eval_shape(function, *shapes)
resources = [compile_for_chip(call, "sm_90") for call in launches]
"""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ejkernel.ops.chips import gpu_named
from ejkernel_triton import _compat
from ejkernel_triton.launch import Launch

POINTER_TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "int8": "*i8",
    "uint32": "*u32",
    "bool": "*i1",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelResources:
    """The resources that a compiled kernel uses on a chip.

    Attributes:
        kernel: Its name.
        registers: Registers per thread.
        spilled_bytes: Bytes of spilled registers per thread.
        shared_memory_bytes: Bytes of shared memory per program.
        binary: Machine code.
        assembly: PTX, or the assembly of AMD's machine code.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_memory_bytes: int
    binary: bytes
    assembly: str


def shared_memory_bytes(call: Launch, chip: str) -> int:
    """Returns the bytes of shared memory of a program, without compiling to machine code: in half the time.

    Args:
        call: From `launch.collect_launches`.
        chip: A name in `ejkernel.ops.chips.GPUS`.

    Raises:
        ValueError: The chip is not known.
    """
    from triton.compiler import ASTSource, make_backend

    target, options = _compile_target(chip), _compile_options(call)
    with _compat.temporary_cache_folder():
        backend: Any = make_backend(target)
        return _compat.compile_shared_memory_bytes(
            backend, _make_ast_source(call, ASTSource), backend.parse_options(options)
        )


def compile_for_chip(call: Launch, chip: str) -> KernelResources:
    """Compiles the kernel of a launch to machine code.

    Args:
        call: From `launch.collect_launches`.
        chip: A name in `ejkernel.ops.chips.GPUS`.

    Raises:
        ValueError: The chip is not known.
    """
    from triton.compiler import ASTSource, compile

    nvidia = gpu_named(chip).vendor == "nvidia"
    with _compat.temporary_cache_folder():
        compiled: Any = compile(_make_ast_source(call, ASTSource), _compile_target(chip), _compile_options(call))
    registers, spilled_bytes = (
        _register_usage(compiled.asm["cubin"]) if nvidia else _amd_register_usage(compiled.asm["amdgcn"])
    )
    return KernelResources(
        kernel=compiled.name,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_memory_bytes=compiled.metadata.shared,
        binary=compiled.asm["cubin" if nvidia else "hsaco"],
        assembly=compiled.asm["ptx" if nvidia else "amdgcn"],
    )


def miscompiled_shifts(ptx: str) -> list[str]:
    """Returns instructions that put a product wider than 32 bits into the low half of a pair of 32-bit integers.

    Triton 3.6 miscompiles some kernels in this way: LLVM joins `x << 28`, whose result is unread, and `y << 1` into one
    shift of two lanes, both marked as not overflowing, and its NVPTX backend packs the lanes into 64 bits. It widens
    the unread lane by `mul.wide.u32 x, 2 ** 28`, so the bits that should have been shifted out end up in y's lane:

        mul.wide.u32 low, x, 268435456      or.b64 pair, low, high shl.b64 high, y, 33                 mov.b64 {_, y <<
        1 | x >> 4}, pair

    Args:
        ptx: The assembly that `compile_for_chip` returns.

    Returns:
        The `or.b64` of each such pair; none if the code is correct.
    """
    definitions: dict[str, str] = {}
    miscompiled: list[str] = []
    for operation, register, rest in re.findall(r"^\s*([\w.]+)\s+(%rd\d+), ([^;]*);", ptx, re.MULTILINE):
        definitions[register] = f"{operation} {rest}"
        operand_definitions = (
            [definitions.get(name.strip(), "") for name in rest.split(",")] if operation == "or.b64" else []
        )
        left_shifts = [re.fullmatch(r"shl\.b64 .*, (\d+)", part) for part in operand_definitions]
        if any(x and int(x[1]) >= 32 for x in left_shifts) and any(
            part.startswith("mul.wide") for part in operand_definitions
        ):
            miscompiled.append(f"{operation} {register}, {rest}")
    return miscompiled


def _compile_target(chip: str) -> Any:
    from triton.backends.compiler import GPUTarget

    gpu = gpu_named(chip)
    # A target needs the threads per warp: 32 on NVIDIA's chips, 64 on CDNA.
    return GPUTarget("cuda", gpu.capability, 32) if gpu.vendor == "nvidia" else GPUTarget("hip", chip, 64)


def _compile_options(call: Launch) -> dict[str, Any]:
    return {"num_warps": call.num_warps, "num_stages": call.num_stages, **_compat.FP_FUSION_OPTIONS}


def _make_ast_source(call: Launch, ast_source_type: Any) -> Any:
    """Returns the source as jax-triton passes it: arrays are aligned to 16 bytes, and the constants are bound."""
    parameter_names = call.kernel.arg_names
    arrays = (*call.inputs, *call.outputs)
    signature = {name: POINTER_TYPES[jnp.dtype(x.dtype).name] for name, x in zip(parameter_names, arrays, strict=False)}
    signature |= dict.fromkeys(call.constants, "constexpr")
    # JAX's buffers are aligned: with this the compiler emits loads of 128 bits and asynchronous copies.
    alignment_attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
    return ast_source_type(call.kernel, signature, dict(call.constants), alignment_attributes)


def _register_usage(binary: bytes) -> tuple[int, int]:
    """Returns registers and stack bytes per thread: kernels have no local arrays, so all of the stack is spilled
    registers.
    """
    report = _run_tool("cuobjdump", "-res-usage", binary)
    counts = [max(map(int, re.findall(rf"{name}:(\d+)", report))) for name in ("REG", "STACK")]
    return counts[0], counts[1]


def disassemble_to_sass(binary: bytes) -> str:
    """Returns the instructions of an NVIDIA binary (SASS), as text."""
    return _run_tool("nvdisasm", "-c", binary)


def _run_tool(tool_name: str, option: str, binary: bytes) -> str:
    """Runs a binary tool from Triton's package and returns its output."""
    import triton

    tool_path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool_name
    with tempfile.TemporaryDirectory() as folder:
        cubin_file = Path(folder, "kernel.cubin")
        cubin_file.write_bytes(binary)
        return subprocess.run([tool_path, option, cubin_file], capture_output=True, text=True, check=True).stdout


def _amd_register_usage(assembly: str) -> tuple[int, int]:
    """Returns registers and bytes of scratch memory per thread; scalars that are spilled to vector lanes take no
    memory.
    """
    counts = [
        max(map(int, re.findall(rf"\.{name}:\s+(\d+)", assembly)))
        for name in ("vgpr_count", "private_segment_fixed_size")
    ]
    return counts[0], counts[1]
