"""Makes `import torchvision` work beside a CPU build of torch.

Where only torchvision's CUDA build can be had, its compiled operators do not load next to a CPU torch, and the import dies
while registering fake kernels for operators that do not exist. Declaring the two missing schemas lets transforms, data sets
and models import; the operators themselves stay unavailable and are not used here.
"""

from __future__ import annotations

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None


def patch_torchvision() -> None:
    """Call before importing torchvision or timm. Does nothing where the operators load."""
    global _library
    if _library is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _forget_half_imported()
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(name + _SCHEMA)


def _forget_half_imported() -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
