"""The command line: one verb for each thing a user does, each ``weft <verb> config.toml [--a.b=c] [--json]``."""

from __future__ import annotations


def main() -> None:
    """What ``weft`` runs."""
    from weft.cli.app import main as run

    run()
