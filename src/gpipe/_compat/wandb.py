"""The private interface of Weights & Biases 0.18 to 0.31 that ends it."""

from typing import Any

import wandb


def end_service() -> None:
    """End wandb's process, and wait for it: `wandb.teardown` itself does not wait for one that was killed."""
    service: Any = wandb.setup()._connection
    try:
        wandb.teardown()
    finally:
        service._proc.join()
