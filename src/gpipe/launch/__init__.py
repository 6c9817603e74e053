"""Start the processes of a run, and end them together."""

import os
import time

BEGAN = time.monotonic()  # nearly the start of this process: slow modules are imported later
# Threads that wait for each other sleep instead of taking cores from other work. OpenMP reads this when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
