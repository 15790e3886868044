"""What exists for callers of the earlier library of this name alone: its import paths, its names, its conventions.

`paths` holds the one table of old import paths. Nothing outside of this package imports it, but for the line in
`ejkernel` that makes old paths importable.
"""
