"""Errors of layers that are described or timed."""


def layer_error(name: str, error: Exception, failure: str, remedy: str) -> ValueError:
    """Return an error of one sentence that says which layer failed at what, why, and what to do."""
    cause = str(error).strip().partition("\n")[0].rstrip(". ")
    return ValueError(f"{name} {failure} ({type(error).__name__}: {cause}); {remedy}.")
