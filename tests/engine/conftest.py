"""One thread for every test of this folder."""

from stages import one_thread as one_thread
