"""What a machine tells of itself, and that every machine of a job is heard."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from ranks import on_ranks

from pipeline import config as configuration
from pipeline.distributed.world import World
from pipeline.tracking import system_metrics
from pipeline.training.build import build


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    found = system_metrics.usage(tmp_path)
    assert found["system/system_memory_usage_megabytes"] > 100
    assert 0 < found["system/disk_usage_percentage"] <= 100
    assert not any("gpu" in name for name in found)


def test_gpus_are_asked_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is the one thing these machines lack; the second GPU does not tell how busy it is."""

    def busy(device: int) -> SimpleNamespace:
        if device == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=97)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda device: SimpleNamespace(used=2_000_000, total=8e6))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", busy)
    found = {name: value for name, value in system_metrics.usage(tmp_path).items() if "gpu" in name}
    assert found == {
        "system/gpu_0_memory_usage_percentage": 25.0,
        "system/gpu_0_memory_usage_megabytes": 2.0,
        "system/gpu_0_utilization_percentage": 97.0,
        "system/gpu_1_memory_usage_percentage": 25.0,
        "system/gpu_1_memory_usage_megabytes": 2.0,
    }


def one_epoch(world: World, url: str, folder: str, ranks_per_machine: int) -> list[str]:
    """Names of the system metrics that the lead logs."""
    placed = World(world.rank, world.size, world.rank % ranks_per_machine)
    words = ("train.epochs=1", "data.batch=256", "model.width=4", "data.threads=1", "tracking.uri=")
    words += ("method.name=cross_entropy", "checkpoint.every_epochs=0")
    trainer = build(configuration.load([f"shards.url={url}", f"output={folder}", *words]), placed)
    logged: dict[str, float] = {}
    trainer.tracker.log = lambda step, metrics: logged.update(metrics)  # type: ignore[method-assign]
    trainer.run()
    trainer.checkpoints.close()
    assert not any("system/" in name for past in trainer.history for name in past)
    return sorted(name for name in logged if name.startswith("system/"))


@pytest.mark.dist
def test_every_machine_is_heard_once_an_epoch(digits: str, tmp_path: Path) -> None:
    """Four ranks as on two machines: the second is heard once; as on one machine: nothing but the lead's own samples."""
    told = on_ranks(4, one_epoch, digits, str(tmp_path / "two"), 2)[0]
    assert "system/node_1/cpu_utilization_percentage" in told
    assert {name.split("/")[1] for name in told} == {"node_1"}
    assert on_ranks(2, one_epoch, digits, str(tmp_path / "one"), 2)[0] == []
