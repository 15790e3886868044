"""Adapts to the versions of Triton and jax-triton, where their interfaces differ."""

import contextlib
import functools
import importlib
import inspect
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any

FP_FUSION_OPTIONS = {"enable_fp_fusion": True}
"""Triton's compile option that fuses multiplications and additions, so that `exp2(x * scale - max)` and running sums
take one instruction each. It is the default before Triton 3.10 only.
"""


@functools.cache
def triton_call() -> Any:
    """Returns `jax_triton.triton_call`."""
    module = importlib.import_module("jax_triton")
    _patch_dead_code_rule()
    return module.triton_call


def _patch_dead_code_rule() -> None:
    """Makes jax-triton 0.4.1 work with JAX 0.12, which passes one argument more to rules of dead-code elimination.

    JAX 0.10 and 0.11 call a rule as (used_outs, eqn), 0.12 as (used_outs, live_ins, eqn); jax-triton's rule takes two
    arguments. A rule that takes another number of arguments is not changed.
    """
    triton_lib = importlib.import_module("jax_triton.triton_lib")
    dce_rules, primitive = getattr(getattr(triton_lib, "pe", None), "dce_rules", {}), triton_lib.triton_kernel_call_p
    dce_rule = dce_rules.get(primitive)
    if dce_rule is None or len(inspect.signature(dce_rule).parameters) != 2:
        return

    def rule_with_live_ins(used_outs: Any, *live_ins_and_eqn: Any) -> Any:
        return dce_rule(used_outs, live_ins_and_eqn[-1])

    dce_rules[primitive] = rule_with_live_ins


@functools.cache
def output_shape_keyword() -> str:
    """Returns the name of the outputs' shapes in `jax_triton.triton_call`: `out_shape` in 0.3, `out_type` in 0.4."""
    parameters = inspect.signature(triton_call()).parameters
    return "out_type" if "out_type" in parameters else "out_shape"


def call_kernel(
    kernel: Any, arrays: Sequence[Any], output_shapes: Sequence[Any], aliases: Mapping[int, int], **options: Any
) -> tuple[Any, ...]:
    """Calls `jax_triton.triton_call`, whose versions pass aliased outputs in different ways.

    jax-triton 0.3 passes a kernel a pointer for an aliased output; 0.4 does not. There the input's array is passed as
    the output's parameter, and some other array as the input's parameter, since an array that is passed twice would be
    copied.

    jaxlib passes a kernel its buffers in one order, all operands and then all results, and jax-triton 0.4 lists the
    kernel's parameters as they are declared. The two agree only if aliased outputs are declared before the others, and
    if their results, which no parameter takes, come last.

    Args:
        kernel: The `triton.jit` function; of its outputs, those that are aliased are declared first.
        arrays: Its inputs.
        output_shapes: Shapes and dtypes.
        aliases: Input index -> output index.
        options: Further arguments of `triton_call`.

    Returns:
        The outputs, in their order.

    Raises:
        ValueError: All inputs are aliased, so there is no other array for their parameters.
    """
    if not aliases or output_shape_keyword() == "out_shape":
        options[output_shape_keyword()] = list(output_shapes)
        return tuple(triton_call()(*arrays, kernel=kernel, input_output_aliases=dict(aliases), **options))
    unaliased_inputs = [x for n, x in enumerate(arrays) if n not in aliases]
    if not unaliased_inputs:
        raise ValueError("launch: all inputs are written over, and the kernel reads none")
    inputs = [unaliased_inputs[0] if n in aliases else x for n, x in enumerate(arrays)]
    input_of_output = {output: source for source, output in sorted(aliases.items(), key=lambda pair: pair[1])}
    aliased_arguments = {kernel.arg_names[len(arrays) + n]: arrays[source] for n, source in input_of_output.items()}
    output_order = [n for n in range(len(output_shapes)) if n not in input_of_output] + list(input_of_output)
    # Indices count the parameters that are arrays: the inputs, then the aliased outputs.
    parameter_aliases = {len(arrays) + n: output_order.index(output) for n, output in enumerate(input_of_output)}
    options["out_type"] = [output_shapes[n] for n in output_order]
    results = triton_call()(
        *inputs, **aliased_arguments, kernel=kernel, input_output_aliases=parameter_aliases, **options
    )
    return tuple(results[output_order.index(n)] for n in range(len(output_shapes)))


@functools.cache
def fp_fusion_argument() -> dict[str, Any]:
    """Returns the argument of `jax_triton.triton_call` for `FP_FUSION_OPTIONS`.

    jax-triton 0.4 passes any compiler option on, 0.3 has an argument for this one.
    """
    parameters = inspect.signature(triton_call()).parameters
    return {"backend_options": FP_FUSION_OPTIONS} if "backend_options" in parameters else FP_FUSION_OPTIONS


def compile_shared_memory_bytes(backend: Any, ast_source: Any, options: Any) -> int:
    """Compiles a source until Triton has laid out shared memory.

    Args:
        backend: From `triton.compiler.make_backend`.
        ast_source: An `ASTSource`.
        options: The backend's parsed options.

    Returns:
        Bytes of shared memory.
    """
    ir = importlib.import_module("triton._C.libtriton").ir
    context, stages, metadata = ir.context(), dict[str, Any](), dict(vars(options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, ast_source.language)
    codegen_helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    module = ast_source.make_ir(backend.target, options, *codegen_helpers, context)
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "llir":
            break
    return metadata["shared"]


@contextlib.contextmanager
def temporary_cache_folder() -> Generator[None]:
    """Provides a cache folder for Triton, since jax-triton turned Triton's cache off for the whole process."""
    if os.environ.get("TRITON_CACHE_DIR") != "":
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ["TRITON_CACHE_DIR"] = ""


def is_interpreted(kernel: Any) -> bool:
    """Returns whether `triton.jit` made a function for the interpreter, as it does with TRITON_INTERPRET=1."""
    return isinstance(kernel, _interpreter_module().InterpretedFunction)


def patch_interpreter() -> None:
    """Makes Triton's interpreter run with NumPy 2.5, and more than twice as fast.

    The interpreter's scalars are arrays of one element, which NumPy 2.5 does not accept as loop bounds. It also checks
    every sum for overflow, and patches `triton.language` in a module at each call of the module's functions; once per
    run suffices. It builds a type and a shape for each value, which values of the same type can share.

    It computes on the bits of bfloat16 as if they were integers, so a kernel that does not convert to float32 raises an
    error here instead of returning wrong results.
    """
    interpreter = _interpreter_module()
    _names_of_patched_modules.clear()

    patch_tensor = interpreter._patch_lang_tensor
    if getattr(patch_tensor, "has_index", False):
        return

    def patch_tensor_with_index_method(tensor: Any, patch_scope: Any) -> None:
        patch_tensor(tensor, patch_scope)
        patch_scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_tensor_with_index_method.has_index = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_tensor_with_index_method
    interpreter.InterpretedFunction.__call__ = _call_interpreted_function
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    builder = type(interpreter.interpreter_builder)
    builder.unary_op, builder.binary_op = _reject_bfloat16(builder.unary_op), _reject_bfloat16(builder.binary_op)
    _cache_types_and_dtypes(interpreter)
    _skip_identity_conversions(type(interpreter.interpreter_semantic))


def _cache_types_and_dtypes(interpreter: Any) -> None:
    """Computes what a block type, its tensors and its NumPy dtype hold once per element type and shape."""
    language = interpreter.tl.core
    init_new_type, init_new_tensor = language.block_type.__init__, language.tensor.__init__
    compute_numpy_dtype = interpreter._get_np_dtype
    fields_of_types: dict[Any, dict[str, Any]] = {}
    numpy_dtypes: dict[str, Any] = {}

    def init_cached_block_type(block_type: Any, element_ty: Any, shape: Any) -> None:
        # Triton compares types by their names, too.
        key = (type(element_ty), element_ty.name, *shape)
        if fields := fields_of_types.get(key):
            vars(block_type).update(fields)
            return
        init_new_type(block_type, element_ty, shape)
        if all(type(size) is int for size in shape):
            # The first tensor of the type adds its fields.
            fields_of_types[key] = {**vars(block_type), "_tensor_fields": {}}

    def init_tensor_from_cache(tensor: Any, handle: Any, tensor_type: Any) -> None:
        fields = getattr(tensor_type, "_tensor_fields", None)
        if fields:
            vars(tensor).update(fields, handle=handle, type=tensor_type)
            return
        init_new_tensor(tensor, handle, tensor_type)
        if fields is not None:
            fields.update({name: x for name, x in vars(tensor).items() if name not in ("handle", "type")})

    def cached_numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = compute_numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    language.block_type.__init__, language.tensor.__init__ = init_cached_block_type, init_tensor_from_cache
    interpreter._get_np_dtype = cached_numpy_dtype


def _skip_identity_conversions(semantic: Any) -> None:
    """Returns the operands at once where a cast or a broadcast would find that it has nothing to do."""
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    @functools.wraps(cast)
    def cast_to_another_dtype(self: Any, tensor: Any, dtype: Any, *rounding: Any, **options: Any) -> Any:
        return tensor if tensor.dtype is dtype else cast(self, tensor, dtype, *rounding, **options)

    @functools.wraps(broadcast)
    def broadcast_to_another_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        types = lhs.type, rhs.type
        if all(x.is_block() for x in types) and list(types[0].shape) == list(types[1].shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.cast, semantic.broadcast_impl_value = cast_to_another_dtype, broadcast_to_another_shape


def _reject_bfloat16(operation: Any) -> Any:
    """Returns an operation of the interpreter that raises an error for bfloat16."""

    @functools.wraps(operation)
    def apply_unless_bfloat16(builder: Any, operand: Any, *other_operands: Any) -> Any:
        if operand.dtype.scalar.is_bf16():
            raise TypeError(
                f"{other_operands[-1].__name__} of bfloat16: got a 16-bit tile, wants float32 in Triton's interpreter"
            )
        return operation(builder, operand, *other_operands)

    return apply_unless_bfloat16


_names_of_patched_modules: set[str] = set()


def _call_interpreted_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an interpreted function from another."""
    module = function.fn.__module__
    if module not in _names_of_patched_modules:
        _interpreter_module()._patch_lang(function.fn)
        _names_of_patched_modules.add(module)
    return function.rewrite()(*args, **kwargs)


def _interpreter_module() -> Any:
    return importlib.import_module("triton.runtime.interpreter")
