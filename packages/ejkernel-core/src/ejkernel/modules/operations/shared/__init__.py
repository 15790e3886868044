"""Checks, argument records and conversions to families' records that several operations share."""
