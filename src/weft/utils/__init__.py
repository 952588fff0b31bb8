"""Helpers for every package: keyed randomness, files, units, imports, and PyTorch's private operations."""
