"""What other packages need to be imported here, each with its version and the reason."""
