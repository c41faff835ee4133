"""The position in a training. With the seed it determines all that follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    stage: int = 0
    epoch: int = 0
    epoch_started: bool = False  # survey taken and beliefs updated for this epoch
    pass_index: int = 0  # pass within the epoch
    step: int = 0  # optimiser steps done in this pass
    global_step: int = 0  # optimiser steps done in all

    def __str__(self) -> str:
        return f"stage {self.stage + 1}, epoch {self.epoch + 1}, step {self.step} ({self.global_step} in all)"
