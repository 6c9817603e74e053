"""Give this Python process simulated GPUs: Python imports this at its start where PYTHONPATH names this folder.

So a program has them together with all processes that it starts. CUDA_VISIBLE_DEVICES names some of them, or none.
"""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    from tests.simulated_cuda import hooks

    hooks.load()

    from tests.simulated_cuda import runtime

    runtime.install()
