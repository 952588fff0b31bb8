"""The formats that data is read from, one module each with a `read(path, ...) -> Data`."""
