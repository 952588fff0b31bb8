"""Where trials run: processes of this machine, or Ray."""
