"""Over HTTP: the server, who may ask, and the stream of changes."""
