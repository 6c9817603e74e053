"""What is refused before a step, what is compared after it, and which layer a message names."""
