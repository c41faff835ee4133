"""Two-layer perceptrons on features, for contrastive losses; with batch normalisation between the layers or without."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.models.batchnorm import CountedRows, convert_batchnorm


class Projection(nn.Module):
    """Linear, batch normalisation if asked for, ReLU, linear. (B,inputs) -> (B,outputs)."""

    def __init__(self, inputs: int, hidden: int, outputs: int, rows: CountedRows | None) -> None:
        """`rows`: those of the network the features are of, whose ranks share statistics; None: no normalisation."""
        super().__init__()
        norm = [] if rows is None else [convert_batchnorm(nn.BatchNorm1d(hidden), rows)]
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), *norm, nn.ReLU(), nn.Linear(hidden, outputs))
        self.rows = CountedRows() if rows is None else rows

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """`mask`: (B,) 0 for rows that must not count in batch statistics, None if all count."""
        with self.rows.use(mask):
            out: Tensor = self.layers(features)
        return out
