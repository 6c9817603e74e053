"""What a pipeline refuses, what it compares to find faults, and which layer a message names."""
