"""Errors of describing or timing layers."""


def layer_error(name: str, error: Exception, failure: str, remedy: str) -> ValueError:
    """Return an error that says in one sentence which layer failed, at what and why, and what to do."""
    cause = str(error).strip().partition("\n")[0].rstrip(". ")
    return ValueError(f"{name} {failure} ({type(error).__name__}: {cause}); {remedy}.")
