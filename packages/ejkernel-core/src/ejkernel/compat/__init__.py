"""What exists for callers of the earlier library of this name and of EjGPU alone: import paths, names and conventions.

`paths` holds the tables of old import paths and names, `upstream.toml` those of differences and of configuration fields
without effect. `import ejkernel.utils`, `ejkernel.xla_utils`, `ejkernel.loggings`, `ejkernel.ejgpu`, `ejkernel.callib`
and `ejkernel.kernel_registry` are modules of this package.
"""
