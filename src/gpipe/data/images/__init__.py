"""Labelled images: the sets by name, their augmentation and their mini-batches."""
