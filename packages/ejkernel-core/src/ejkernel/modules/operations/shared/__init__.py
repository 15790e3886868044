"""Checks, argument records and lowering that several operations share."""
