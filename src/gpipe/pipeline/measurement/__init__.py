"""When tasks ran, and what a step reports."""
