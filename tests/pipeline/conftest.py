"""One thread for every test of this folder."""

from one_thread import one_thread as one_thread
