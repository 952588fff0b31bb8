"""Trials of one shape as one batched training."""
