"""Checkpoints: folders of safetensors files under layer names, which any number of stages can read.

    checkpoints/
      latest                         the name of the newest folder, one line
      best                           the name of the one whose evaluation had the least loss
      step-00000120/
        manifest.json                position, config, and every file and tensor (manifest.py)
        weights-0.safetensors        layers.0.weight, layers.1.bias, ...    written by stage 0
        ema-0.safetensors            the same names
        optimizer-0.safetensors      layers.0.weight/square_avg, ...
        weights-1.safetensors        ...                                    written by stage 1

A checkpoint is written beside its place, flushed to the disk, and renamed: a folder of that name is complete.
"""
