"""Import paths, names and conventions that exist only for callers of EjGPU and of the earlier library named
ejkernel.

`paths` holds the tables of old import paths and names, `upstream.toml` has the tables of differences and of
configuration fields without effect. `import ejkernel.utils`, `ejkernel.xla_utils`, `ejkernel.loggings`,
`ejkernel.ejgpu`, `ejkernel.callib` and `ejkernel.kernel_registry` are modules of this package.
"""
