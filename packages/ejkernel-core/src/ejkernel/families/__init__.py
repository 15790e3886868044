"""Families: the records that operations lower to, their meaning, their residuals."""
