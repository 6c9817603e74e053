"""Plan a run before anything is launched: memory, seconds and bubble, stage by stage."""
