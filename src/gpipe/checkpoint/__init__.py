"""Checkpoints: folders of safetensors files under layer names, which any number of stages can read.

    checkpoints/
      latest                         the name of the newest folder, one line
      best                           the name of the one with the lowest evaluation loss
      step-00000120/
        manifest.json                position, config, and every file and tensor
        weights-0.safetensors        layers.0.weight, layers.1.bias, ...    written by stage 0
        ema-0.safetensors            the same names
        optimizer-0.safetensors      layers.0.weight/square_avg, ...
        weights-1.safetensors        ...                                    written by stage 1

A checkpoint folder appears only when it is complete: it is written under another name, flushed to the disk, and
renamed. All processes see the same folder. Replicas other than the first have the same tensors and write nothing.

A save (saver.py) continues while the next steps run:

    rehearse  before training: each process writes a file, the leader a manifest, and all of it is deleted
    save      the leader creates a partial folder; each process notes its tensors
    thread    each process copies its tensors in memory, writes its files and flushes them, then part-<process>.json;
              the leader waits for all parts, writes manifest.json, renames the folder, points `latest` to it, and
              deletes old checkpoints
    update    of the weights: waits until the tensors are copied; forward and backward do not change them
    check     between the following steps: if a process had an error, all processes raise it

A load (read.py):

    manifest  each process parses and validates the untrusted manifest.json
    compare   names, shapes and dtypes with the model's; if one process finds a difference, all raise it
    verify    the files that have this process's layers: SHA-256, header
    read      the tensors; only then does the model change

Read the files in this order:

    content.py   what is saved                         saver.py     the save of all processes
    format.py    names of tensors, safetensors files   writer.py    one process's copies, and its thread
    manifest.py  manifest.json, parsed and validated   read.py      loading, exporting and verifying
    folder.py    finding and deleting checkpoints      __main__.py  the command line: verify, describe, export
    errors.py    errors, raised on all processes
    stale_statistics.py  batch norms whose statistics no evaluation has estimated
"""
