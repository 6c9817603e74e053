"""Make `import torchvision` work beside a CPU build of torch; import this module before timm or torchvision.

A torchvision (0.28) whose compiled operators do not match the installed torch fails to import, because it describes the
operators `nms` and `qnms`, which were never declared. Declaring their schemas is enough for its data sets, transforms
and models and for all of timm; its compiled operators (detection, `torchvision.io`) stay absent.
"""

from importlib import import_module  # noqa: TID251 - torchvision can only be imported behind this guard

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


import_torchvision()
