"""Labelled images: sets by name, augmentation, and mini-batches.

catalogue.py         the sets, one row per name
image_set.py         labelled images by index. Readers: class_folders.py, image_table.py, torchvision_sets.py,
                     memory_sets.py, birdsnap.py
labelled_subset.py   a subset, and a validation split
augmentation.py      from an image to the model's input; mixing.py, from two images to one
loader.py            mini-batches
"""
