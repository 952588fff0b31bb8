"""``python -m weft`` is the command line, also where the script is not on the path."""

from weft.cli import main

if __name__ == "__main__":
    main()
