"""Golden values: what must be bit-identical before and after a refactoring, as one JSON file. See ``__main__``."""
