"""The documents of plans."""
