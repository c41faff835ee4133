"""Train: `torchrun --nproc_per_node=8 -m pipeline.train [--config FILE] [key=value ...]`. This file only wires."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import config as configuration
from pipeline.config import Config
from pipeline.process import stop_request
from pipeline.process.exit_status import is_supervised, run_rank, write_exit_status
from shards.base.errors import Unreachable, UserError
from shards.base.settings import flatten

if TYPE_CHECKING:
    from pipeline.tracking.tracker import Status


def main(argv: list[str]) -> int:
    config = configuration.load(argv)  # before torch: a typing mistake is told at once
    stop_request.die_with_parent()
    from pipeline.distributed import world as ranks
    from pipeline.distributed.step_sync import TrainingStopped
    from pipeline.process.diagnose import explain_failure
    from pipeline.process.log import log, start_logging
    from pipeline.training import final_outputs, run_folder

    config = config.model_copy(update={"output": config.output or run_folder.default_folder(config)})
    world = ranks.init_distributed(config.train.device, config.train.timeout)
    trainer = None
    try:
        start_logging(world.is_main)
        trainer, folder = build(config, world)
        if done := world.broadcast_object(
            run_folder.finished(folder)
        ):  # the lead's folder counts, others may have none
            log.info("this run has finished already (best %.2f, last %.2f): %s", done["best"], done["last"], folder)
            return write_exit_status("finished")
        if world.is_main:
            start_logging(True, folder / "log.txt")
            run_folder.write_config(config, folder)
        status: Status = "FAILED"
        try:
            trainer.run()
            summary = final_outputs.write_final_outputs(config, trainer, folder)
            status = "FINISHED"
        except TrainingStopped as stop:
            status = "KILLED"
            log.warning("stopped (%s); everything is saved, the same command goes on from here", stop)
            return write_exit_status("stopped", str(stop))
        finally:
            trainer.tracker.finish(status)
            trainer.checkpoints.close()
        if summary:
            final_outputs.record_mlflow_run(folder, summary, trainer.tracker.run_id)
            log.info(
                "best %.2f  last %.2f  in %.0f s: %s", summary["best"], summary["last"], summary["seconds"], folder
            )
        return write_exit_status("finished")
    except UserError as error:
        if world.is_main or not is_supervised():  # the entry tells what only another rank found
            print(f"error: {error}", file=sys.stderr)
        return write_exit_status("failed" if isinstance(error, Unreachable) else "refused", str(error))
    except Exception as error:
        sentence = explain_failure(error, world.rank, trainer and trainer.position, config.train.timeout)
        log.error(sentence)
        write_exit_status("failed", sentence)
        raise
    finally:
        ranks.shutdown_distributed()


def build(config: Config, world: Any) -> tuple[Any, Path]:
    """Everything a run is made of, on this rank."""
    import torch

    from pipeline.checkpoints.checkpointer import Checkpointer
    from pipeline.checkpoints.run_lock import lock
    from pipeline.data.batch import TrainingSet
    from pipeline.methods.options import load_method
    from pipeline.process.stop_request import StopRequest
    from pipeline.training.trainer import Trainer
    from shards.reader import open_split

    url, folder = _on_lead_first(config, world)
    train = open_split(url, "train", config.data.cache)
    tests = {name: open_split(url, name, config.data.cache) for name in train.manifest.splits if name != "train"}
    data = TrainingSet(
        train.given,
        len(train.classes),
        config.seed,
        config.data.batch,
        tuple(train.shard_sizes),
        config.data.shuffle_window,
    )
    torch.manual_seed(config.seed)
    method = load_method(config.method.name)(config, data, world)
    if world.size > 1 and world.device.type == "cuda" and config.model.sync_batchnorm:
        method = torch.nn.SyncBatchNorm.convert_sync_batchnorm(method)
    method.to(world.device)
    stop_source = StopRequest(config.train.deadline_minutes, config.train.stop_file or str(folder / "stop"))
    lock(folder, world)
    checkpoints = Checkpointer(
        config.checkpoint.url or str(folder / "checkpoints"),
        config.checkpoint.keep,
        world,
        config.checkpoint.background,
    )
    trainer = Trainer(
        config, method, train, tests, world, checkpoints,
        lambda state: _tracker(config, world, folder, train, state), stop_source, _sample_log(config, folder, world),
    )  # fmt: skip
    return trainer, folder


def _on_lead_first(config: Config, world: Any) -> tuple[str, Path]:
    """Shards are built and the folder is made by one rank; an error there is everybody's."""
    from pipeline.training import run_folder
    from shards.build import ensure

    said: tuple[str, str] | UserError | None = None
    if world.is_main:
        try:
            folder = run_folder.create_run_folder(config)
            said = (ensure(config.shards), str(folder))
        except UserError as error:
            said = error
    said = world.broadcast_object(said)
    if isinstance(said, UserError):
        raise said
    return said[0], Path(said[1])


def _tracker(config: Config, world: Any, folder: Path, train: Any, state: dict[str, Any] | None) -> Any:
    from pipeline.tracking.tracker import NullTracker, Tracker
    from pipeline.training import run_folder

    if not world.is_main or run_folder.finished(folder):
        return NullTracker()
    tags = {
        "method": config.method.name,
        "dataset": train.manifest.source,
        "manifest": train.manifest.hash,
        "table_cell": config.table_cell,
        "ranks": str(world.size),
        "recipe": config.recipe,
        "rho": f"{train.manifest.bias.rho:g}",
        "noise": f"{train.manifest.bias.noise:g}",
    }
    params = flatten(config.model_dump(mode="json"))
    bias = train.manifest.bias
    name = run_folder.run_name(config, train.manifest.source, bias.rho, bias.noise)
    tracker = Tracker(config.tracking, folder, name, params, tags, state)
    tracker.dataset({"name": train.manifest.source, "digest": train.manifest.hash[:32], "source": train.url,
                     "samples": len(train), "classes": len(train.classes), "rho": bias.rho, "noise": bias.noise})  # fmt: skip
    return tracker


def _sample_log(config: Config, folder: Path, world: Any) -> Any:
    """Which samples were seen in which step, for whoever wants to count them."""
    if not config.train.sample_log:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # on another machine than the lead's it may not be there
    file = open(folder / f"samples-rank{world.rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(at: Any, batch: Any) -> None:
        seen = batch.index[batch.valid > 0].tolist()
        file.write(json.dumps([at.stage, at.epoch, at.pass_index, at.step, seen]) + "\n")
        file.flush()

    return write


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
