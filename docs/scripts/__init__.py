"""The scripts behind the pages and pictures that nobody writes by hand: `python -m docs.scripts [--check]`."""
