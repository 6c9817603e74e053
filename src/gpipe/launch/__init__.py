"""Start the processes of a run, and end them together."""
