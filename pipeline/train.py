"""Train: `torchrun --nproc_per_node=8 -m pipeline.train [--config FILE] [key=value ...]`. Parse, build, train, close."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipeline import config as configuration
from pipeline.process import stop_request
from pipeline.process.exit_status import is_supervised, run_rank, write_exit_status
from shards.base.cli import print_error
from shards.base.errors import Unreachable, UserError
from shards.base.interrupt import ends_at_once
from shards.base.progress import waiting

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.tracking.tracker import Status
    from pipeline.training.trainer import Trainer

CHOSEN_ON = {"validation": "the validation part", "test": "the test set"}


def main(argv: list[str]) -> int:
    asked, argv = configuration.take_estimate(argv)
    config = configuration.load(argv)  # before torch is imported: a typing mistake is answered at once
    if asked is not None:
        from pipeline.models.pretrained import with_weights_defaults
        from pipeline.training.estimate import print_estimate

        return print_estimate(with_weights_defaults(config), asked)
    return run(config)


def run(config: Config) -> int:
    """A whole run on this rank, from its settings to its exit code."""
    stop_request.die_with_parent()
    from pipeline.process.log import log, start_logging

    rank = int(os.environ.get("RANK", "0"))
    start_logging(rank == 0)
    with ends_at_once(), waiting("loading torch", log.info if rank == 0 else None, first=1.0):
        from pipeline.distributed.world import init_distributed, shutdown_distributed
        from pipeline.process.diagnose import explain_failure
        from pipeline.process.torch_settings import apply_torch_settings
        from pipeline.training import run_folder
        from pipeline.training.build import build

    config = config.model_copy(update={"output": config.output or run_folder.default_folder(config)})
    apply_torch_settings(config.train)
    trainer = None
    try:
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
    from pipeline.tracking.ui import ui_line_of_id, where_tracked
    from pipeline.training import final_outputs, run_folder
    from pipeline.training.progress_lines import start_line
    from shards.names import few_in_words

    folder, world = Path(trainer.config.output), trainer.world
    if done := world.broadcast_object(run_folder.read_summary(folder)):  # rank 0's folder counts
        log.info("this run has finished already (best %.2f, last %.2f): %s", done["best"], done["last"], folder)
        return write_exit_status("finished")
    if world.is_main:
        start_logging(True, folder / "log.txt")
        run_folder.write_config(trainer.config, folder)
        log.info(start_line(trainer.config, world, trainer.train_split, trainer.tests))
        log.info(where_tracked(trainer.config.tracking))
    try:
        trainer.run()
        summary = final_outputs.write_final_outputs(trainer, folder)
    except TrainingStopped as stop:
        log.warning("stopped (%s). Everything is saved; the same command goes on from here", stop)
        _close(trainer, "KILLED")
        return write_exit_status("stopped", str(stop))
    except BaseException as error:
        try:
            _close(trainer, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        except SaveError as second:  # the first error is the one that ends the run
            log.warning("%s", second)
        raise
    _close(trainer, "FINISHED")
    if summary:
        final_outputs.record_mlflow_run(folder, summary, trainer.tracker.run_id)
        log.info(
            "best %.2f (epoch %d, chosen on %s)  last %.2f  in %.0f s: %s",
            summary["best"], summary["best_epoch"] + 1, CHOSEN_ON[summary["best_chosen_on"]], summary["last"],
            summary["seconds"], folder,
        )  # fmt: skip
        if summary["few"] is not None:
            log.info("rare classes, last: %.2f%s", summary["few"], few_in_words(summary))
        if trainer.tracker.run_id:
            log.info("runs: %s", ui_line_of_id(trainer.config.tracking.uri, trainer.tracker.experiment_id))
    return write_exit_status("finished")


def _close(trainer: Trainer, status: Status) -> None:
    """Send what MLflow has not got yet, and wait for the last checkpoint; SaveError if it cannot be written."""
    trainer.tracker.finish(status)
    trainer.checkpoints.close()


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
