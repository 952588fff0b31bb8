"""Machines and their links as values, presets, and what collectives cost on them."""
