"""Boundary tensors between processes."""
