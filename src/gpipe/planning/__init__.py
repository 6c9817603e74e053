"""Plan a run before anything is launched: the cut into stages, and their memory, seconds and bubble."""
