"""Make `import torchvision` work beside a CPU build of torch; import this module before timm or torchvision.

A torchvision (0.28) whose compiled operators do not match the installed torch fails to import, because it describes the
operators `nms` and `qnms`, which were never declared. Declaring their schemas is enough for its data sets, transforms
and models and for all of timm; its compiled operators (detection, `torchvision.io`) stay absent.
"""

from importlib import import_module  # noqa: TID251 - torchvision can only be imported behind this guard
from pathlib import Path
from typing import Any

from torch import library

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# The declarations last only as long as this object does.
_declarations: library.Library | None = None


def import_torchvision() -> None:
    """Import torchvision, declaring the missing operators if, and only if, they are why the import fails."""
    global _declarations
    try:
        import_module("torchvision")
    except RuntimeError as error:
        # Never unconditionally: where the compiled operators exist, declaring them again aborts the process.
        if _declarations is not None or str(error) != _MISSING_OPERATOR:
            raise
        _declarations = library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _declarations.define(operator + _ARGUMENTS)
        import_module("torchvision")


def list_files(data_set: Any) -> tuple[list[Path], list[int]]:
    """Return the paths and the labels of a data set's images, which torchvision has under private names only."""
    if hasattr(data_set, "_samples"):
        return [Path(path) for path, _ in data_set._samples], [int(label) for _, label in data_set._samples]
    paths = data_set._images if hasattr(data_set, "_images") else data_set._image_files
    return [Path(path) for path in paths], list(data_set._labels)


import_torchvision()
