"""The documents that the page shows, one module a view."""
