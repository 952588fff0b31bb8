"""``python -m weft.cli`` is ``weft``."""

from weft.cli.program import main

if __name__ == "__main__":
    main()
