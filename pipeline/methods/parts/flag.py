"""A yes or no that a checkpoint keeps and the host knows."""

from __future__ import annotations

import torch
from torch import nn


class Flag:
    """A bool buffer of a module, false at first, and its value on the host: asking for it needs no synchronisation."""

    def __init__(self, module: nn.Module, name: str) -> None:
        module.register_buffer(name, torch.zeros((), dtype=torch.bool))
        module.register_load_state_dict_post_hook(lambda *_: self._read())
        self.module, self.name, self.value = module, name, False

    def __bool__(self) -> bool:
        return self.value

    def set(self, value: bool) -> None:
        self.value = value
        self.module.get_buffer(self.name).fill_(value)

    def _read(self) -> None:
        self.value = bool(self.module.get_buffer(self.name))
