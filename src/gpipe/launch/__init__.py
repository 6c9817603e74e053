"""Start the processes of a run, and end them together."""

import time

BEGAN = time.monotonic()  # nearly the start of this process: slow modules are imported later
