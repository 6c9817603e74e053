"""Labelled images: the sets by name, augmentation, and their mini-batches."""
