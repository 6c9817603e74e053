"""Labelled images: sets by name, augmentation, and mini-batches."""
