"""The document `tune`: trials, importances, and devices over time."""
