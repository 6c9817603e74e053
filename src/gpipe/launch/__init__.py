"""Start the processes of a run, and end them together."""

import time

BEGAN = time.monotonic()  # nearly the start of this process: it loads this before what takes seconds to load
