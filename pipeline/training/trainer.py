"""The training loop: stages, surveys, passes, evaluation. It depends on no method.

    for each stage:
        for each epoch:
            survey -> method.begin_epoch       outputs for every training sample; update beliefs
            for each pass: for each batch:     forward, backward, step; StepSync
            survey -> evaluate -> log          with the beliefs and the network as they are now; every N epochs
            checkpoint

The state of the loop is a Position. A stopped run resumes there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from pipeline.checkpoints.checkpointer import Checkpointer, Loaded
from pipeline.checkpoints.position import Position
from pipeline.config import Config
from pipeline.data.batch import Batch, Pass
from pipeline.data.loader import Loader
from pipeline.distributed.step_sync import StepSync, StopSource, TrainingStopped
from pipeline.distributed.world import World
from pipeline.engines.engine import Engine
from pipeline.evaluation.accuracy import Evaluation, evaluate
from pipeline.evaluation.metrics import cleaning_metrics
from pipeline.methods.base import Method, Stage
from pipeline.methods.parts.survey import Survey, take_survey
from pipeline.models.precision import autocast_for
from pipeline.process.log import Clock, log
from pipeline.process.stop_request import StopRequest
from pipeline.tracking import system_metrics
from pipeline.tracking.final_metrics import chosen_on, with_front
from pipeline.tracking.tracker import NullTracker
from pipeline.training.kept_backbone import write_backbone
from pipeline.training.lr_schedule import lr_at
from pipeline.training.progress_lines import STEPS, bad_gradient, counted, epoch_line, fitting, show_loss, step_bar
from pipeline.training.state import DataState, FeaturesState, TrainingState
from shards.base.errors import UserError
from shards.base.redact import redact_all
from shards.bias import class_groups
from shards.reader import Split

OnBatch = Callable[[Position, Batch], None]


@dataclass(frozen=True)
class TrainingData:
    """The splits of a run and a loader for each; where stored features are, if the run uses such."""

    train: Split
    tests: dict[str, Split]
    loader: Loader
    test_loaders: dict[str, Loader]
    features: FeaturesState | None = None


class Trainer:
    def __init__(
        self,
        config: Config,
        world: World,
        method: Method,
        engine: Engine,
        data: TrainingData,
        checkpoints: Checkpointer,
        tracker: NullTracker,
        stop_source: StopSource | None = None,
        on_batch: OnBatch | None = None,
        resume: Loaded | None = None,
    ) -> None:
        """`resume`: checkpoint to resume from."""
        self.config, self.world, self.method, self.engine = config, world, method, engine
        self.train_split, self.tests, self.features = data.train, data.tests, data.features
        self.loader, self.test_loaders = data.loader, data.test_loaders
        self.checkpoints, self.tracker, self.on_batch = checkpoints, tracker, on_batch
        self.step_sync = StepSync(world, stop_source)
        method.stoppable_world = self.step_sync.stoppable_world()
        self.autocast = autocast_for(config.train.precision, world.device)
        self.position = Position()
        self.history: list[dict[str, float]] = []  # metrics of every finished epoch
        self.epoch_metrics: dict[str, float] = {}  # metrics of the current epoch
        self.loss_sums: dict[str, Tensor] = {}  # losses of the current epoch, summed on the device
        self.next_survey: Survey | None = None  # taken before evaluation, reused next epoch
        self.last_evaluation: dict[str, Evaluation] = {}
        self.undecodable = 0  # pictures that did not decode, on all ranks
        self.images = 0.0  # trained on so far; below: seconds of training, and of waiting for data
        self.train_seconds = self.wait_seconds = 0.0
        self.clock = Clock()
        self.last_save = time.monotonic()
        if resume is not None:
            self.load_state_dict(cast(TrainingState, resume.tree))
            log.info("resuming from %s: %s", resume.name, self.position)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end. Raises TrainingStopped, with everything saved, when all ranks agreed to stop."""
        try:
            for _ in self.steps():
                pass
        except TrainingStopped:
            self._save(wait=True)
            raise
        self._save(wait=True)
        self.engine.close()

    def steps(self) -> Iterator[dict[str, Tensor]]:
        """The loop, from `position` to the end; yields this rank's named losses after every optimiser step."""
        stages = self.method.stages()
        while self.position.stage < len(stages):
            stage = stages[self.position.stage]
            self.method.set_epoch(self.position.stage, self.position.epoch)  # the engine asks what is frozen
            self.engine.begin_stage(stage, resuming=self.position.epoch > 0 or self.position.epoch_started)
            while self.position.epoch < (stage.epochs or min(stage.steps, 1)):
                yield from self._epoch(stage)
            if stage.self_supervised:
                self._keep_backbone()
            self.position = Position(self.position.stage + 1, global_step=self.position.global_step)

    def _epoch(self, stage: Stage) -> Iterator[dict[str, Tensor]]:
        self.method.set_epoch(self.position.stage, self.position.epoch)
        if not self.position.epoch_started:
            self._start_epoch()
        if isinstance(self.step_sync.stop_source, StopRequest):
            self.step_sync.stop_source.at_once = False  # from here on there is something to save
        passes = self.method.passes()
        while self.position.pass_index < len(passes):
            yield from self._run_pass(passes[self.position.pass_index], stage)
            self.position.pass_index, self.position.step = self.position.pass_index + 1, 0
        last = max([1, *(self.loader.steps(pass_) for pass_ in passes[-1:])])  # a method may need no pass
        best = self._evaluate(self._lr(stage, last - 1, last)) if stage.epochs and stage.evaluated else False
        if stage.self_supervised:
            self._log_losses(stage)
        self.position = Position(self.position.stage, self.position.epoch + 1, global_step=self.position.global_step)
        every = self.config.checkpoint.every_epochs
        if stage.epochs and ((every and self.position.epoch % every == 0) or best):
            self._save(best=best)

    def _start_epoch(self) -> None:
        """Survey the training set if the method asks for it, and let it update its beliefs."""
        survey = None
        if self.method.surveys_before_epoch():
            survey = self.next_survey or self._survey()
        self.next_survey = None
        with fitting(self.config.method.name, self.world):
            self.method.begin_epoch(survey)
        self.loss_sums, self.epoch_metrics, self.position.epoch_started = {}, {}, True
        beliefs = self.method.beliefs
        if self.world.is_main:
            split = self.train_split
            self.epoch_metrics = cleaning_metrics(beliefs, split.given, split.true, class_groups(split.clean_counts))

    def _lr(self, stage: Stage, step: int, steps: int) -> float:
        """Of a step of a pass. Every pass goes through the epoch's part of the schedule: passes train networks of their own."""
        optim = stage.optim or self.config.optim
        return lr_at(optim, self.position.epoch, stage.epochs, stage.constant_lr, step, steps)

    def _run_pass(self, pass_: Pass, stage: Stage) -> Iterator[dict[str, Tensor]]:
        """One pass over the samples, from `position.step` on."""
        if stage.steps:  # a stage measured in steps: at most one pass
            pass_ = replace(pass_, order=pass_.order[: stage.steps * (pass_.batch or self.config.data.batch)])
        self.engine.set_trainable(pass_.trainable or stage.trainable)
        self.method.train()
        title = f"{stage.name} {self.position.epoch + 1}/{stage.epochs}" if stage.epochs else stage.name
        steps, timer = self.loader.steps(pass_), self.world.timer
        order_key = self.method.order_key(self.position.pass_index)
        waited = self.loader.wait_seconds
        timer.start()
        batches = self.loader.batches(pass_, order_key, self.position.step)
        bar = step_bar(steps, self.position.step, title, self.world)
        for batch in bar.over(batches, lambda batch: int(batch.last)):
            if self.on_batch:
                self.on_batch(self.position, batch)
            losses = self.engine.step(batch, self._lr(stage, self.position.step, steps))
            self._accumulate_losses(losses, batch)
            if not batch.last:
                continue
            self.position.step, self.position.global_step = self.position.step + 1, self.position.global_step + 1
            self.train_seconds += timer.seconds
            self.wait_seconds += self.loader.wait_seconds - waited
            waited = self.loader.wait_seconds
            save = self.step_sync.sync(timer.work_seconds, self._save_due())
            timer.start()
            self._check_gradients(batch, title, steps)
            if self.world.is_main and (self.position.global_step % self.config.train.log_every == 0):
                show_loss(bar, self.loss_sums)
            if save and self.position.step < steps:
                self._save()
            yield losses

    def _log_losses(self, stage: Stage) -> None:
        """Log the losses of an epoch that is not evaluated, by its number in the stage."""
        self._reduce_losses()
        losses = {key: value for key, value in self.epoch_metrics.items() if key.startswith("loss/")}
        total = losses.pop("loss/total")
        self.tracker.log(self.position.epoch + 1, losses)
        log.info("%s, epoch %d of %d: loss %.3f", stage.name, self.position.epoch + 1, stage.epochs, total)
        self._warn_undecodable()

    def _keep_backbone(self) -> None:
        """All networks begin with the backbone that has learned; its file is for other runs. A restart may do it again."""
        self.engine.close()  # weights are whole
        backbone, config = self.method.share_backbone(), self.config
        if config.output:
            self.world.on_main(lambda: write_backbone(backbone, config, self.train_split.manifest.hash))

    def _evaluate(self, lr: float) -> bool:
        """End the epoch: evaluate if this epoch's turn has come, and log; returns whether it is the best so far."""
        if self.method.surveys_after_epoch():
            self.next_survey = self._survey()
        self.method.end_epoch(self.next_survey)
        epochs = sum(stage.epochs for stage in self.method.stages() if stage.evaluated)
        number = self.epochs_done + 1
        evaluated = number == epochs or number % self.config.train.evaluate_every == 0
        if evaluated:
            for result in self.evaluate_all().values():
                self.epoch_metrics |= result.metrics
        self._reduce_losses()
        self.epoch_metrics |= {
            "train/lr": lr,
            "train/epoch": float(self.position.epoch),
            "time/seconds": self.clock.seconds,
        }
        if self.images:  # a method may need no step
            self.epoch_metrics["time/images_per_second"] = self.images / max(self.train_seconds, 1e-9)
            self.epoch_metrics["time/step"] = self.train_seconds / max(self.position.global_step, 1)
            self.epoch_metrics["time/data_wait"] = self.wait_seconds / max(self.train_seconds, 1e-9)
        key = f"{chosen_on(self.epoch_metrics)}/top1"
        best = evaluated and all(self.epoch_metrics[key] > past[key] for past in self.history if key in past)
        self.history.append(dict(self.epoch_metrics))
        self.tracker.log(self.epochs_done, with_front(self.epoch_metrics) | self._node_metrics())
        log.info(epoch_line(self.epoch_metrics, self.epochs_done, epochs))
        self._warn_undecodable()
        slow = self.step_sync.slowest_rank()
        if slow and self.world.is_main:
            log.warning("rank %d is slow: it worked %.1f times as long as the others in this epoch.", *slow)
        return best

    def _node_metrics(self) -> dict[str, float]:
        """CPU, memory and GPU use of the other machines; rank 0 samples its own all the time."""
        if not self.config.tracking.system_metrics:
            return {}
        mine = system_metrics.usage(Path()) if self.world.local_rank == 0 and not self.world.is_main else None
        others = [usage for usage in self.world.all_gather_object(mine) if usage]
        return {
            key.replace("system/", f"system/node_{number}/", 1): value
            for number, usage in enumerate(others, start=1)
            for key, value in usage.items()
        }

    def _warn_undecodable(self) -> None:
        """Warn if more pictures than before did not decode, on any rank."""
        bad = {index: why for part in self.world.all_gather_object(self.loader.bad) for index, why in part.items()}
        if len(bad) > self.undecodable and self.world.is_main:
            some = "; ".join(f"sample {index}: {why}" for index, why in sorted(bad.items())[:3])
            log.warning("%d pictures do not decode; their weight is zero (%s).", len(bad), some)
        self.undecodable = len(bad)

    @property
    def epochs_done(self) -> int:
        return len(self.history)

    def evaluate_all(self) -> dict[str, Evaluation]:
        """Every test split, with true labels where they are known."""
        for name, split in self.tests.items():
            labels = split.true if (split.true >= 0).any() else split.given
            batches = counted(self.test_loaders[name].survey(), len(split), f"evaluation, {name}", self.world)
            counts = self.train_split.clean_counts
            self.last_evaluation[name] = evaluate(
                self.method,
                name,
                batches,
                labels,
                counts,
                self.world,
                self.step_sync,
                self.autocast,
                self.engine.dummy_forward,
            )
        return self.last_evaluation

    # -- helpers ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _survey(self) -> Survey:
        self.method.eval()

        def outputs(index: Tensor, images: Tensor) -> dict[str, Tensor]:
            with self.autocast:
                return self.method.survey_outputs(images, self.method.data.labels(index))

        def dummy(images: Tensor) -> dict[str, Tensor]:
            return outputs(torch.zeros(len(images), dtype=torch.long, device=images.device), images)

        total = len(self.train_split)
        batches = counted(self.loader.survey(), total, "survey of the training set", self.world)
        return take_survey(outputs, self._keep_pace(batches, dummy), total, self.world)

    def _keep_pace(
        self, batches: Iterable[tuple[Tensor, Tensor]], forward: Callable[[Tensor], object]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Own batches; after them, dummy forward passes while other ranks still have batches."""
        for item in self.step_sync.keep_pace(batches):
            if item is None:
                self.engine.dummy_forward(forward)
            else:
                yield item

    def _accumulate_losses(self, losses: dict[str, Tensor], batch: Batch) -> None:
        """Sum losses on the device. The host reads them when the epoch ends."""
        self.images += batch.total + (batch.second.total if batch.second else 0)
        for name, value in {**losses, STEPS: torch.ones_like(losses["loss"])}.items():
            total = self.loss_sums.get(name)
            value = value.double() * batch.share
            self.loss_sums[name] = value if total is None else total + value

    def _loss_sums_by_rank(self) -> dict[str, Tensor]:
        """Sums by name, (R,) one per rank: a resumed run adds them in the same order."""
        if not self.loss_sums:
            return {}
        rows = self.world.all_gather_rows(torch.stack(list(self.loss_sums.values()))[None], [1] * self.world.size)
        return dict(zip(self.loss_sums, rows.unbind(1)))

    def _own_loss_sum(self, sums_R: Tensor) -> Tensor:
        """This rank's part of saved sums; on another number of ranks rank 0 takes all."""
        if len(sums_R) == self.world.size:
            own = sums_R[self.world.rank].clone()  # a view would hold the whole checkpoint in memory
        else:
            own = sums_R.sum() * float(self.world.is_main)
        return own.to(self.world.device)

    def _reduce_losses(self) -> None:
        """Means over the steps of the epoch and over ranks."""
        if self.loss_sums:
            total = self.world.all_reduce_sum(torch.stack(list(self.loss_sums.values())))
            means = dict(zip(self.loss_sums, (total / total[list(self.loss_sums).index(STEPS)]).tolist()))
            self.epoch_metrics |= {
                f"loss/{'total' if name == 'loss' else name}": v for name, v in means.items() if name != STEPS
            }

    def _check_gradients(self, batch: Batch, title: str, steps: int) -> None:
        """Every few steps, on all ranks alike: stop if the gradient was not finite too often."""
        if self.position.global_step % self.config.train.log_every and self.position.step < steps:
            return
        bad = self.engine.nonfinite_steps()
        if bad > self.config.train.max_bad_steps:
            parts = self.world.all_gather_object(batch.index[batch.valid > 0].tolist())
            samples = [index for part in parts for index in part]
            where = f"step {self.position.global_step} ({title})"
            raise UserError(bad_gradient(bad, where, samples, self.checkpoints.newest))
        if bad and self.world.is_main:
            log.warning("step %d: %d steps with a non-finite gradient were skipped.", self.position.global_step, bad)

    # -- state --------------------------------------------------------------------------------------------------------

    def _save_due(self) -> bool:
        """Rank 0's clock decides; StepSync tells the other ranks."""
        rule = self.config.checkpoint
        if rule.every_steps and self.position.global_step % rule.every_steps == 0:
            return True
        return bool(
            rule.every_minutes and self.world.is_main and time.monotonic() - self.last_save > 60 * rule.every_minutes
        )

    def _save(self, best: bool = False, wait: bool = False) -> None:
        self.last_save = time.monotonic()
        step, state = self.position.global_step, self.state_dict()
        gathered = {f"method/{name}" for name in self.method.tables} if self.world.size > 1 else set()
        if wait:  # a large one on a slow store may take longer than a collective may
            self.world.on_main(lambda: self.checkpoints.save(step, state, best=best, wait=True, uncopied=gathered))
        else:
            self.checkpoints.save(step, state, best=best, uncopied=gathered)

    def state_dict(self) -> TrainingState:
        """Everything a checkpoint holds. Called by all ranks together."""
        return {
            "config": redact_all(self.config.model_dump(mode="json")),
            "data": self._data_state(),
            "position": asdict(self.position),
            "method": self._whole_tables(self.engine.model_state_dict()),
            "engine": self.engine.optimizer_state_dict(),
            "history": self.history,
            "epoch_metrics": self.epoch_metrics,
            "loss_sums": self._loss_sums_by_rank(),
            "tracking": self.tracker.state(),
            "effort": {
                "seconds": self.clock.seconds,
                "images": self.images,
                "train_seconds": self.train_seconds,
                "wait_seconds": self.wait_seconds,
            },
        }

    def _data_state(self) -> DataState:
        state: DataState = {
            "manifest": self.train_split.manifest.hash,
            "classes": list(self.train_split.classes),
            "given_counts": self.train_split.info.given_counts,  # opens the model where the shards are not
            "clean_counts": self.train_split.info.clean_counts,  # many, medium and few wherever it is evaluated
        }
        return {**state, "features": self.features} if self.features else state

    def _whole_tables(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tables of the method (Method.register_table) whole on rank 0, which writes them; own rows on the others."""
        sizes = self.world.rank_slice_sizes(len(self.method.data))
        return state | {name: self.world.gather_rows(state[name], sizes) for name in sorted(self.method.tables)}

    def load_state_dict(self, state: TrainingState) -> None:
        self.engine.load_model_state_dict(state["method"])
        self.engine.load_optimizer_state_dict(state["engine"])
        self.position = Position(**state["position"])
        self.history, self.epoch_metrics = state["history"], state["epoch_metrics"]
        self.loss_sums = {name: self._own_loss_sum(value) for name, value in state["loss_sums"].items()}
        effort = state["effort"]
        self.clock = Clock(effort["seconds"])
        self.images, self.train_seconds = effort["images"], effort["train_seconds"]
        self.wait_seconds = effort.get("wait_seconds", 0.0)  # missing in older checkpoints
