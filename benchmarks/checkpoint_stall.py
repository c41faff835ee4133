"""How long a training step waits for a checkpoint, over the time of a synchronous save of the same state.

Claim checked: at most 0.10. Two arms in one process, interleaved pair by pair on the same tensors and disk:
`save` with background=False (returns when every byte is on the disk) and with background=True (returns when
the copy is made). The first pair, which also allocates the host memory, is reported apart.

    python benchmarks/checkpoint_stall.py [folder on the disk to be used]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch
from record import write

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.distributed.world import World

MEGABYTES = 220  # weights and momentum of InceptionResNet-v2 are about twice that
PAIRS = 20


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Many tensors of the sizes a convolutional network has."""
    torch.manual_seed(0)
    sizes = [(512, 512, 3, 3), (256, 256, 3, 3), (512,), (1536, 1000), (64, 64, 3, 3), (256,)]
    out: dict[str, torch.Tensor] = {}
    total = 0
    while total < MEGABYTES << 20:
        tensor = torch.randn(sizes[len(out) % len(sizes)])
        out[f"layer{len(out)}.weight"] = tensor
        total += tensor.numel() * 4
    return {"method": out}


def timed(checkpointer: Checkpointer, step: int, tree: dict[str, dict[str, torch.Tensor]]) -> float:
    start = time.perf_counter()
    checkpointer.save(step, tree)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)  # as `make` runs ranks on small machines; threads that fight for cores copy slower
    tree = state()
    pairs: list[tuple[float, float]] = []
    written: list[float] = []
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        whole = Checkpointer(f"{folder}/sync", 2, World(), background=False)
        quick = Checkpointer(f"{folder}/background", 2, World(), background=True)
        for step in range(PAIRS + 1):
            synchronous = timed(whole, step, tree)
            stall = timed(quick, step, tree)
            start = time.perf_counter()
            quick.close()
            written.append(stall + time.perf_counter() - start)
            pairs.append((stall, synchronous))
    ratios = sorted(stall / synchronous for stall, synchronous in pairs[1:])
    low, middle, high = (statistics.quantiles(ratios, n=4)[i] for i in range(3))
    result = {
        "claim": "stall / synchronous save <= 0.10",
        "holds": high <= 0.10,
        "ratio_median": middle,
        "ratio_quartiles": [low, high],
        "ratio_worst": ratios[-1],
        "first_ratio": pairs[0][0] / pairs[0][1],
        "stall_ms_median": 1000 * statistics.median(stall for stall, _ in pairs[1:]),
        "synchronous_ms_median": 1000 * statistics.median(whole for _, whole in pairs[1:]),
        "background_write_ms_median": 1000 * statistics.median(written[1:]),
        "megabytes": sum(t.numel() * 4 for t in tree["method"].values()) / 2**20,
        "pairs": PAIRS,
    }
    write(result, "torch")


if __name__ == "__main__":
    main()
