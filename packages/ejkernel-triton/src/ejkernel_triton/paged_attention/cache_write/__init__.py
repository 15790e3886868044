"""Writes new tokens into a cache of pages."""
