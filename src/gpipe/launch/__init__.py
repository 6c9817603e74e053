"""Start the processes of a run, and end them together.

processes.py         adopt torchrun's, start one per stage and replica, or stay in this one; agent.py watches them
devices.py           the GPUs and cores of this host
rendezvous.py        how processes find each other, in a store (store.py)
stops.py             requests to stop
errors.py            each error is one message, however many processes raise it
terminal.py          a run outlives its terminal
scratch.py           the folder of temporary files
garbage_collection.py, paused_collection.py    no collection while programs start
"""

import os
import time

BEGAN = time.monotonic()  # nearly the start of this process: slow modules are imported later
# Threads that wait for each other sleep instead of taking cores from other work. OpenMP reads this when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
