"""From a folder of 600 photographs to a trained model, an audit of the labels and a report: how long over the features alone?

- ours: `evenhand quick pictures/`, a process from its start to its end: shards, features, classifier, audit, report. The model
  is there when `summary.json` is; that time is taken, too.
- bare: a process that opens the same photographs with Pillow, resizes and crops them, and puts them through the same
  network with the same weights, as many at a time; it writes nothing.

Supermarket photographs of 14 kinds, EfficientNet-Lite0, weights at hand. Runs take turns; the first round, which fills caches,
does not count. On a quiet machine:

    python benchmarks/quick.py [rounds]        # writes benchmarks/results/quick.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from photos import photographs
from record import ratios, summary, write

PICTURES = 600
BATCH = 16
BACKBONE = "tf_efficientnet_lite0"
ROOT = Path(__file__).parents[1]


def make_folder(folder: Path) -> None:
    """One folder for each kind."""
    pictures, label, test = photographs()
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(~test))[:PICTURES]
    for number in chosen.tolist():
        path = folder / f"{label[number]:02d}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[number])


def features_alone(folder: Path) -> None:
    """What `bare` runs."""
    import torch
    from PIL import Image

    from pipeline.config import ModelConfig
    from pipeline.models.backbones import build_backbone

    backbone, _ = build_backbone(ModelConfig(backbone=BACKBONE, pretrained="true"))
    backbone.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    paths = sorted(folder.rglob("*.jpg"))
    with torch.inference_mode():
        for first in range(0, len(paths), BATCH):
            rows = []
            for path in paths[first : first + BATCH]:
                picture = Image.open(path).convert("RGB")
                scale = 256 / min(picture.size)
                width, height = (max(256, round(side * scale)) for side in picture.size)
                left, top = (width - 224) // 2, (height - 224) // 2
                picture = picture.resize((width, height), Image.Resampling.BICUBIC).crop(
                    (left, top, left + 224, top + 224)
                )
                rows.append(np.asarray(picture))
            images = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).float() / 127.5 - 1
            backbone(images.contiguous(memory_format=torch.channels_last))


def timed(words: list[str], place: Path) -> float:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    environment = {key: value for key, value in environment.items() if not key.startswith("MLFLOW_")}
    begun = time.time()
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment, check=False, capture_output=True, text=True
    )
    seconds = time.time() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return seconds


def main(rounds: int) -> None:
    whole, model, bare = [], [], []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_folder(place / "pictures")
        for number in range(rounds + 1):
            begun = time.time()
            took = timed(["-m", "launch.quick", "pictures", f"output=run{number}"], place)
            ready = (place / f"run{number}" / "summary.json").stat().st_mtime - begun
            alone = timed([__file__, "bare", "pictures"], place)
            print(
                f"round {number}: all {took:.1f} s, model after {ready:.1f} s, features alone {alone:.1f} s", flush=True
            )
            if number:
                whole.append(took), model.append(ready), bare.append(alone)
    write(
        {
            "what": "evenhand quick on 600 photographs, against their features alone; two cores, weights at hand",
            "seconds": {"all": summary(whole), "model": summary(model), "bare": summary(bare)},
            "all_over_bare": ratios(whole, bare),
            "model_over_bare": ratios(model, bare),
        },
        "torch", "timm", "pillow",
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        features_alone(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
