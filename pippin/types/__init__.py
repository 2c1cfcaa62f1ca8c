"""Frozen values that travel between packages. Standard library and msgspec only."""
