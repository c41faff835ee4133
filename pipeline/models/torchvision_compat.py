"""Makes `import torchvision` work beside a CPU build of torch.

The compiled operators of torchvision's CUDA build do not load beside a CPU torch. The import then fails where it registers
fake kernels for the missing operators. Declaring the two missing schemas lets transforms, data sets and models import. The
operators stay unavailable; nothing here uses them.
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
        _remove_partial_import()
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(name + _SCHEMA)


def _remove_partial_import() -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
