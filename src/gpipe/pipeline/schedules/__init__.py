"""Orders of tasks other than GPipe's, and the choice of one by its name."""
