"""What does a training step cost beyond the network itself?

- ours: the steps of the real trainer, from batch to batch: loader, views, losses, gradient check, optimiser, agreement
  of the ranks, log; for cross-entropy and for the Prototypical Classifier (two views, mixing, three losses);
- bare: a loop that puts as many pictures, in as many calls, through a copy of the same network, with
  cross-entropy, backward and the same fused optimiser; its pictures lie ready in memory.

Digits at 32 pixels, PreAct ResNet-18 of width 16, batch 64, one thread each for the network and the loader. Blocks of an epoch's
steps take turns; ratios are taken between neighbouring blocks. The first step of an epoch, which waits for the loader to
start, is left out, and so are surveys and evaluation. On a quiet machine:

    OMP_NUM_THREADS=1 python benchmarks/step.py [epochs]        # writes benchmarks/results/step.json
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from typing import Any

import torch
from record import ratios, summary, write

from pipeline import config as configuration
from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.models.network import Network
from pipeline.training.build import build

SETTINGS = ("data.size=32", "model.width=16", "data.batch=64", "data.threads=1", "train.log_every=1000", "tracking.uri=",
            "tracking.system_metrics=false", "checkpoint.every_epochs=0", "checkpoint.background=false")  # fmt: skip
METHODS = {"cross_entropy": (), "prototypical": ("method.warmup_steps=0", "method.cleaning_start=0.1")}


class Bare:
    """The network, and nothing else."""

    def __init__(self, network: Network) -> None:
        self.network = copy.deepcopy(network).train()
        learn = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(learn, 0.01, 0.9, weight_decay=5e-4, fused=True)

    def steps(self, calls: list[list[torch.Tensor]]) -> float:
        """Seconds for steps, each given as the pictures of its calls."""
        begun = time.perf_counter()
        for pictures in calls:
            for rows in pictures:
                features, logits = self.network(rows)
                loss = torch.nn.functional.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))
                if self.network.projector is not None:
                    loss = loss + self.network.embed(features).sum() * 0
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - begun


class Watch:
    """Called by the trainer before every step: times its steps, and lets the bare loop do the same in between."""

    def __init__(self, network: Network) -> None:
        self.bare = Bare(network)
        self.calls: list[list[torch.Tensor]] = []
        self.ours: list[float] = []
        self.alone: list[float] = []
        self.epoch = -1
        self.begun = 0.0
        network.backbone.register_forward_pre_hook(self._note)

    def _note(self, backbone: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if backbone.training and self.calls:
            self.calls[-1].append(inputs[0].detach().clone())

    def __call__(self, at: Any, batch: Batch) -> None:
        now = time.perf_counter()
        if (at.stage, at.epoch) != self.epoch:
            self.epoch, self.calls, self.begun = (at.stage, at.epoch), [[]], 0.0
            return
        if not self.begun:  # the first step is over
            self.begun, self.calls = now, [[]]
            return
        if at.step == self.last_step:
            self.ours.append(now - self.begun)
            self.alone.append(self.bare.steps(self.calls))
            self.calls = []
            return
        self.calls.append([])

    last_step = 0


def measure(method: str, words: tuple[str, ...], epochs: int, folder: str) -> Watch:
    given = [f"output={folder}/{method}", f"shards.output={folder}/shards", f"train.epochs={epochs}"]
    config = configuration.load(["--config=configs/digits.yaml", f"method.name={method}", *SETTINGS, *words, *given])
    trainer = build(config, World())
    watch = Watch(trainer.method.network)
    Watch.last_step = len(trainer.train_split) // config.data.batch - 1
    trainer.on_batch = watch
    trainer.run()
    trainer.checkpoints.close()
    return watch


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": "step time of the trainer over a bare loop through the same network",
        "epochs": epochs,
    }
    with tempfile.TemporaryDirectory() as folder:
        for method, words in METHODS.items():
            watch = measure(method, words, epochs, folder)
            ours, alone = watch.ours[1:], watch.alone[1:]  # the first block warms up
            result[method] = {
                "steps_in_a_block": Watch.last_step - 1,
                "seconds": {"ours": summary(ours), "bare": summary(alone)},
                "ours_over_bare": ratios(ours, alone),
            }
            print(method, result[method], flush=True)
    write(result, "torch")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
