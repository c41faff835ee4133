"""Train: `torchrun --nproc_per_node=8 -m pipeline.train [--config FILE] [key=value ...]`. Parse, build, train, close."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipeline import config as configuration
from pipeline.process import stop_request
from pipeline.process.exit_status import is_supervised, run_rank, write_exit_status
from shards.base.cli import print_error
from shards.base.errors import Unreachable, UserError

if TYPE_CHECKING:
    from pipeline.tracking.tracker import Status
    from pipeline.training.trainer import Trainer


def main(argv: list[str]) -> int:
    asked, argv = configuration.take_estimate(argv)
    config = configuration.load(argv)  # before torch is imported: a typing mistake is answered at once
    if asked is not None:
        from pipeline.training.estimate import print_estimate

        return print_estimate(config, asked)
    stop_request.die_with_parent()
    from pipeline.distributed.world import init_distributed, shutdown_distributed
    from pipeline.process.diagnose import explain_failure
    from pipeline.process.log import log, start_logging
    from pipeline.process.torch_settings import apply_torch_settings
    from pipeline.training import run_folder
    from pipeline.training.build import build

    config = config.model_copy(update={"output": config.output or run_folder.default_folder(config)})
    apply_torch_settings(config.train)
    rank = int(os.environ.get("RANK", "0"))
    trainer = None
    try:
        start_logging(rank == 0)
        world = init_distributed(config.train.device, config.train.timeout)
        trainer = build(config, world)
        code = train(trainer)
    except UserError as error:
        if rank == 0 or not is_supervised():  # launch.entry prints what only another rank met
            print_error(error)
        return write_exit_status("failed" if isinstance(error, Unreachable) else "refused", str(error))
    except Exception as error:
        sentence = explain_failure(error, rank, trainer and trainer.position, config.train.timeout)
        log.error(sentence)
        write_exit_status("failed", sentence)
        raise
    shutdown_distributed()  # not after an error: it would wait for operations that other ranks never join
    return code


def train(trainer: Trainer) -> int:
    """Train to the end, write the results, close everything; returns the exit code."""
    from pathlib import Path

    from pipeline.checkpoints.checkpointer import SaveError
    from pipeline.distributed.step_sync import TrainingStopped
    from pipeline.process.log import log, start_logging
    from pipeline.training import final_outputs, run_folder

    folder, world = Path(trainer.config.output), trainer.world
    if done := world.broadcast_object(run_folder.read_summary(folder)):  # rank 0's folder counts
        log.info("this run has finished already (best %.2f, last %.2f): %s", done["best"], done["last"], folder)
        return write_exit_status("finished")
    if world.is_main:
        start_logging(True, folder / "log.txt")
        run_folder.write_config(trainer.config, folder)
        log.info(world.about)
    try:
        trainer.run()
        summary = final_outputs.write_final_outputs(trainer, folder)
    except TrainingStopped as stop:
        log.warning("stopped (%s). Everything is saved; the same command goes on from here", stop)
        _close(trainer, "KILLED")
        return write_exit_status("stopped", str(stop))
    except BaseException:
        try:
            _close(trainer, "FAILED")
        except SaveError as second:  # the first error is the one that ends the run
            log.warning("%s", second)
        raise
    _close(trainer, "FINISHED")
    if summary:
        final_outputs.record_mlflow_run(folder, summary, trainer.tracker.run_id)
        log.info("best %.2f  last %.2f  in %.0f s: %s", summary["best"], summary["last"], summary["seconds"], folder)
    return write_exit_status("finished")


def _close(trainer: Trainer, status: Status) -> None:
    """Send what MLflow has not got yet, and wait for the last checkpoint; SaveError if it cannot be written."""
    trainer.tracker.finish(status)
    trainer.checkpoints.close()


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
