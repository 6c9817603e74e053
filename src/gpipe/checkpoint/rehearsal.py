"""A save without the tensors' numbers: it fails where a save would, and costs no more than a few small files."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.header import form_of
from gpipe.checkpoint.manifest import MANIFEST, Manifest
from gpipe.checkpoint.parsing import parse_fields, read_json
from gpipe.checkpoint.state import Kinds
from gpipe.checkpoint.writer import part_of
from gpipe.durable_files import write_flushed


def rehearse_part(partial: Path, process: int, kinds: Kinds) -> int:
    """Write a process's file without tensors into a folder that all processes see; return the tensors' bytes.

    Raises CheckpointError where a tensor has a type that checkpoints do not have, OSError where nothing can be written.
    """
    try:
        forms = [form_of(name, tensor) for tensors in kinds.values() for name, tensor in tensors.items()]
    except ValueError as error:
        raise CheckpointError(f"No checkpoint can be saved: {error}") from None
    write_flushed(part_of(partial, process), json.dumps({"files": {}, "tensors": {}}))
    return sum(form.num_bytes for form in forms)


def rehearse_manifest(partial: Path, manifest: Manifest, processes: Sequence[int], num_bytes: int) -> None:
    """Write a manifest that can be read again, and rename its folder, which is deleted then.

    num_bytes: of the tensors of all processes, which must fit onto the disk.
    Raises CheckpointError where the manifest cannot be written or read or the disk is too small, OSError of the disk.
    """
    for process in processes:
        manifest.add(json.loads(part_of(partial, process).read_bytes()))
    text = manifest.to_json()
    try:
        parse_fields(read_json(text.encode()))
    except ValueError as error:
        raise CheckpointError(f"No checkpoint can be saved, because none could be read again: {error}") from None
    write_flushed(partial / MANIFEST, text)
    _check_room(partial.parent, num_bytes)
    renamed = partial.with_suffix(".deleted")
    partial.rename(renamed)
    shutil.rmtree(renamed)


def _check_room(folder: Path, num_bytes: int) -> None:
    disk = shutil.disk_usage(folder)
    if disk.total > 0 and disk.free < num_bytes:  # of some network disks the size is not known
        raise CheckpointError(
            f"{folder} has room for {disk.free:,} bytes, but a checkpoint has more than {num_bytes:,}: make room on "
            "that disk, or save nothing by trainer.checkpoints.keep=null."
        )
