"""What everything else may use: randomness by name, files, units."""
