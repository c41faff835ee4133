"""The loop. It knows stages, surveys, passes and evaluation, and no method by name.

    for each stage:
        for each epoch:
            survey -> method.begin_epoch        what does the network say of every training sample, what to believe
            for each pass: for each batch:      forward, backward, step; all ranks agree to go on
            survey -> evaluate -> log           with the beliefs and the network as they are now
            checkpoint

Where it stands is six numbers (Position); stopped anywhere, it goes on there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.checkpoints.position import Position
from pipeline.config import Config
from pipeline.data.batch import Batch, Pass
from pipeline.data.loader import open_loader
from pipeline.distributed.step_sync import StepSync, StopSource, TrainingStopped
from pipeline.distributed.world import World, arrived, set_off
from pipeline.engines import make_engine
from pipeline.evaluation.accuracy import Evaluation, evaluate
from pipeline.evaluation.metrics import class_groups, cleaning_metrics
from pipeline.methods.base import Method, Stage
from pipeline.methods.parts.survey import Survey, take_survey
from pipeline.models.precision import autocast_for
from pipeline.process.log import Clock, follow, log
from pipeline.tracking import system_metrics
from pipeline.tracking.tracker import NullTracker
from pipeline.training.lr_schedule import lr_at
from shards.base.errors import UserError
from shards.base.redact import redact_all
from shards.reader import Split

STEPS = "steps"  # among the summed losses: how many steps were summed


class Trainer:
    def __init__(
        self,
        config: Config,
        method: Method,
        train: Split,
        tests: dict[str, Split],
        world: World,
        checkpoints: Checkpointer,
        make_tracker: Callable[[dict[str, Any] | None], NullTracker],
        stop_source: StopSource | None = None,
        on_batch: Callable[[Position, Batch], None] | None = None,
    ) -> None:
        self.config, self.method, self.world = config, method, world
        self.train_split, self.tests = train, tests
        self.loader = open_loader(train, config.data, config.seed, world, config.optim.accumulate)
        self.test_loaders = {name: open_loader(split, config.data, config.seed, world) for name, split in tests.items()}
        self.autocast = autocast_for(config.train.precision, world.device)
        self.engine = make_engine(config, method, world)
        self.step_sync = StepSync(world, stop_source)
        self.checkpoints, self.on_batch = checkpoints, on_batch
        self.position = Position()
        self.history: list[dict[str, float]] = []  # metrics of every finished epoch
        self.epoch_metrics: dict[str, float] = {}  # metrics of the epoch in the making
        self.loss_sums: dict[str, Tensor] = {}  # losses of the epoch, summed on the device
        self.next_survey: Survey | None = None  # taken for evaluation, serves the next epoch too
        self.last_evaluation: dict[str, Evaluation] = {}
        self.bad_pictures = 0
        self.images = 0.0  # pictures trained on, the seconds that took, and those of them spent waiting for pictures
        self.train_seconds = self.wait_seconds = 0.0
        self.clock = Clock()
        self.last_save = time.monotonic()
        state = self._resume()
        self.tracker = make_tracker(state)
        if self.tracker.lost:
            for epoch, past in enumerate(self.history, 1):
                self.tracker.log(epoch, past)

    # -- the algorithm ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end. Raises TrainingStopped, with everything saved, when all ranks agreed to stop."""
        try:
            stages = self.method.stages()
            while self.position.stage < len(stages):
                stage = stages[self.position.stage]
                self.engine.begin_stage(stage, resuming=self.position.epoch > 0 or self.position.epoch_started)
                while self.position.epoch < (stage.epochs or min(stage.steps, 1)):
                    self._epoch(stage)
                self.position = Position(self.position.stage + 1, global_step=self.position.global_step)
        except TrainingStopped:
            self._save(wait=True)
            raise
        self._save(wait=True)
        self.engine.close()

    def _epoch(self, stage: Stage) -> None:
        self.method.set_epoch(self.position.stage, self.position.epoch)
        if not self.position.epoch_started:
            self._start_epoch()
        lr = lr_at(stage.optim or self.config.optim, self.position.epoch, stage.epochs, stage.constant_lr)
        passes = self.method.passes()
        while self.position.pass_index < len(passes):
            self._run_pass(passes[self.position.pass_index], stage, lr)
            self.position.pass_index, self.position.step = self.position.pass_index + 1, 0
        best = self._evaluate(lr) if stage.epochs and stage.evaluated else False
        self.position = Position(self.position.stage, self.position.epoch + 1, global_step=self.position.global_step)
        every = self.config.checkpoint.every_epochs
        if stage.epochs and ((every and self.position.epoch % every == 0) or best):
            self._save(best=best)

    def _start_epoch(self) -> None:
        """Survey the training set if the method wants it, and let it decide what to believe in this epoch."""
        survey = None
        if self.method.surveys_before_epoch():
            survey = self.next_survey or self._survey()
        self.next_survey = None
        self.method.begin_epoch(survey)
        self.loss_sums, self.epoch_metrics, self.position.epoch_started = {}, {}, True
        beliefs = self.method.beliefs
        if self.world.is_main:
            split = self.train_split
            self.epoch_metrics = cleaning_metrics(beliefs, split.given, split.true, class_groups(split.clean_counts))

    def _run_pass(self, pass_: Pass, stage: Stage, lr: float) -> None:
        """One pass over an order of samples, from wherever it was left."""
        if stage.steps:  # a stage by steps: at most one pass over the data
            pass_ = replace(pass_, order=pass_.order[: stage.steps * (pass_.batch or self.config.data.batch)])
        self.engine.set_trainable(pass_.trainable or stage.trainable)
        self.method.train()
        title = f"{stage.name} {self.position.epoch + 1}/{stage.epochs}" if stage.epochs else stage.name
        steps = self.loader.steps(pass_)
        order_key = self.method.order_key(self.position.pass_index)
        began, waited = set_off(), self.loader.wait_seconds
        batches = self.loader.batches(pass_, order_key, self.position.step)
        for batch in follow(batches, steps, title, self.world.is_main, self.position.step):
            if self.on_batch:
                self.on_batch(self.position, batch)
            losses = self.engine.step(batch, lr)
            self._accumulate_losses(losses, batch)
            if not batch.last:
                continue
            self.position.step, self.position.global_step = self.position.step + 1, self.position.global_step + 1
            self.train_seconds += time.monotonic() - began
            self.wait_seconds += self.loader.wait_seconds - waited
            waited = self.loader.wait_seconds
            save = self.step_sync.sync(arrived() - began, self._save_due())
            began = set_off()
            self._check_gradients(batch, title, steps)
            if save and self.position.step < steps:
                self._save()

    def _evaluate(self, lr: float) -> bool:
        """Evaluate, log the epoch, and say whether it is the best so far."""
        if self.method.surveys_after_epoch():
            self.next_survey = self._survey()
        self.method.end_epoch(self.next_survey)
        for name, result in self.evaluate_all().items():
            self.epoch_metrics |= {key.replace("test/", f"{name}/", 1): value for key, value in result.metrics.items()}
        self._reduce_losses()
        self.epoch_metrics |= {
            "train/lr": lr,
            "train/epoch": float(self.position.epoch),
            "time/seconds": self.clock.seconds,
        }
        self.epoch_metrics["time/images_per_second"] = self.images / max(self.train_seconds, 1e-9)
        self.epoch_metrics["time/step"] = self.train_seconds / max(self.position.global_step, 1)
        self.epoch_metrics["time/data_wait"] = self.wait_seconds / max(self.train_seconds, 1e-9)
        best = all(self.epoch_metrics["test/top1"] > past["test/top1"] for past in self.history)
        self.history.append(dict(self.epoch_metrics))
        self.tracker.log(self.epochs_done, self.epoch_metrics | self._node_metrics())
        log.info("epoch %d  %s", self.epochs_done, _epoch_line(self.epoch_metrics))
        self._warn_undecodable()
        slow = self.step_sync.slowest_rank()
        if slow and self.world.is_main:
            log.warning("rank %d is slow: %.1f times the work of the others in this epoch.", *slow)
        return best

    def _node_metrics(self) -> dict[str, float]:
        """CPU, memory and GPU use of the machines without the lead, which watches its own all the time."""
        if not self.config.tracking.system_metrics:
            return {}
        mine = system_metrics.usage(Path()) if self.world.local_rank == 0 and not self.world.is_main else None
        others = [told for told in self.world.all_gather_object(mine) if told]
        return {
            key.replace("system/", f"system/node_{number}/", 1): value
            for number, told in enumerate(others, start=1)
            for key, value in told.items()
        }

    def _warn_undecodable(self) -> None:
        """A warning when more pictures than before turned out not to decode, on any rank."""
        bad = {index: why for part in self.world.all_gather_object(self.loader.bad) for index, why in part.items()}
        if len(bad) > self.bad_pictures and self.world.is_main:
            some = "; ".join(f"sample {index}: {why}" for index, why in sorted(bad.items())[:3])
            log.warning("%d pictures do not decode and count with weight zero (%s).", len(bad), some)
        self.bad_pictures = len(bad)

    @property
    def epochs_done(self) -> int:
        return len(self.history)

    def evaluate_all(self) -> dict[str, Evaluation]:
        """Every test split, with true labels where they are known."""
        for name, split in self.tests.items():
            labels = split.true if (split.true >= 0).any() else split.given
            batches = self.test_loaders[name].survey()
            counts = self.train_split.clean_counts
            self.last_evaluation[name] = evaluate(
                self.method,
                batches,
                labels,
                counts,
                self.world,
                self.step_sync,
                self.autocast,
                self.engine.dummy_forward,
            )
        return self.last_evaluation

    # -- the parts ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _survey(self) -> Survey:
        self.method.eval()
        given = torch.from_numpy(self.method.data.given).to(self.world.device, torch.long)  # looked up without a wait

        def outputs(index: Tensor, images: Tensor) -> dict[str, Tensor]:
            with self.autocast:
                return self.method.survey_outputs(images, given[index])

        def idle(images: Tensor) -> dict[str, Tensor]:
            return outputs(torch.zeros(len(images), dtype=torch.long, device=images.device), images)

        return take_survey(outputs, self._keep_pace(self.loader.survey(), idle), len(self.train_split), self.world)

    def _keep_pace(
        self, batches: Iterable[tuple[Tensor, Tensor]], look: Callable[[Tensor], Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Own batches; after them, keep company with ranks that still have some."""
        for item in self.step_sync.keep_pace(batches):
            if item is None:
                self.engine.dummy_forward(look)
            else:
                yield item

    def _accumulate_losses(self, losses: dict[str, Tensor], batch: Batch) -> None:
        """Sum losses on the device; nothing is read back before the epoch ends."""
        self.images += sum(batch.rows)
        share = torch.tensor(batch.share, dtype=torch.float64)
        for name, value in {**losses, STEPS: torch.ones_like(losses["loss"])}.items():
            kept = self.loss_sums.get(name)
            value = value.double() * share
            self.loss_sums[name] = value if kept is None else kept + value

    def _loss_sums_by_rank(self) -> dict[str, Tensor]:
        """Sums by name and rank, (R,) each: added up later in the same order, they give the same bits."""
        if not self.loss_sums:
            return {}
        rows = self.world.all_gather_rows(torch.stack(list(self.loss_sums.values()))[None], [1] * self.world.size)
        return dict(zip(self.loss_sums, rows.unbind(1)))

    def _own_loss_sum(self, sums_R: Tensor) -> Tensor:
        """This rank's part of saved sums; on another number of ranks the lead takes all."""
        if len(sums_R) == self.world.size:
            own = sums_R[self.world.rank]
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
        """Every few steps, and on all ranks alike: is the training still sane?"""
        if self.position.global_step % self.config.train.log_every and self.position.step < steps:
            return
        bad = self.engine.nonfinite_steps()
        if bad > self.config.train.max_bad_steps:
            parts = self.world.all_gather_object(batch.index[batch.valid > 0].tolist())
            samples = [index for part in parts for index in part]
            raise UserError(
                f"The gradient was not finite for {bad} steps in a row, up to step {self.position.global_step} ({title}). Its samples: "
                f"{', '.join(map(str, samples[:16]))}{', ...' if len(samples) > 16 else ''}. Lower optim.lr, set optim.clip, or "
                f"use train.precision=fp32. The last good checkpoint is {self.checkpoints.newest or 'none yet'}."
            )
        if bad and self.world.is_main:
            log.warning(
                "step %d: %d steps with a gradient that is not finite were skipped.", self.position.global_step, bad
            )

    # -- state --------------------------------------------------------------------------------------------------------

    def _save_due(self) -> bool:
        """Only the lead's clock counts; the others learn of it when the ranks synchronise."""
        rule = self.config.checkpoint
        if rule.every_steps and self.position.global_step % rule.every_steps == 0:
            return True
        return bool(
            rule.every_minutes and self.world.is_main and time.monotonic() - self.last_save > 60 * rule.every_minutes
        )

    def _save(self, best: bool = False, wait: bool = False) -> None:
        self.last_save = time.monotonic()
        tree = {
            "config": redact_all(self.config.model_dump(mode="json")),
            "data": {
                "manifest": self.train_split.manifest.hash,
                "classes": list(self.train_split.classes),
                "given_counts": self.train_split.info.given_counts,  # opens the model where the shards are not
                "clean_counts": self.train_split.info.clean_counts,  # many, medium and few wherever it is judged
            },
            "position": asdict(self.position),
            "method": self.engine.model_state_dict(),
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
        self.checkpoints.save(self.position.global_step, tree, best=best, wait=wait)

    def _resume(self) -> dict[str, Any] | None:
        loaded = self.checkpoints.load()
        if loaded is None:
            return None
        tree = loaded.tree
        check_resumable(self.config, self.train_split, tree, loaded.name)
        self.engine.load_model_state_dict(tree["method"])
        self.engine.load_optimizer_state_dict(tree["engine"])
        self.position = Position(**tree["position"])
        self.history, self.epoch_metrics = tree["history"], tree["epoch_metrics"]
        self.loss_sums = {name: self._own_loss_sum(value) for name, value in tree["loss_sums"].items()}
        effort = tree["effort"]
        self.clock = Clock(effort["seconds"])
        self.images, self.train_seconds = effort["images"], effort["train_seconds"]
        self.wait_seconds = effort.get("wait_seconds", 0.0)  # unknown to older checkpoints
        log.info(
            "resuming from %s: stage %d, epoch %d, step %d",
            loaded.name,
            self.position.stage,
            self.position.epoch,
            self.position.step,
        )
        return tree["tracking"]


MAY_CHANGE = ("output", "engine", "deepspeed", "checkpoint", "tracking", "table_cell", "train.device", "train.log_every",
              "train.timeout", "train.max_bad_steps", "train.deadline_minutes", "train.stop_file", "train.sample_log",
              "data.threads", "data.prefetch", "data.cache", "data.loader", "data.max_bad", "shards",
              "model.compile", "model.channels_last", "model.checkpoint_activations", "model.pretrained")  # fmt: skip


def check_resumable(config: Config, split: Split, tree: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint of another training, saying how it differs."""
    from shards.base.settings import flatten

    advice = "Give another `output` to start anew, or restore the settings to go on."
    if tree["data"]["manifest"] != split.manifest.hash:
        raise UserError(f"Checkpoint {name} belongs to other shards (its manifest has another hash). {advice}")
    if tree["config"]["method"]["name"] != config.method.name:
        raise UserError(f"Checkpoint {name} is one of method.name={tree['config']['method']['name']}. {advice}")
    then, now = flatten(tree["config"]), flatten(config.model_dump(mode="json"))
    fixed = [
        k for k in sorted(then.keys() | now.keys()) if not any(k == m or k.startswith(m + ".") for m in MAY_CHANGE)
    ]
    changed = [f"{key} was {then.get(key)!r}, is {now.get(key)!r}" for key in fixed if then.get(key) != now.get(key)]
    if changed:
        raise UserError(f"Checkpoint {name} was made with other settings: {'; '.join(changed[:8])}. {advice}")


def _epoch_line(found: dict[str, float]) -> str:
    names = {
        "test/top1": "top1 %.2f",
        "clean/f1": "clean-F1 %.3f",
        "clean/threshold": "threshold %.3f",
        "loss/total": "loss %.3f",
    }
    shown = [text % found[key] for key, text in names.items() if key in found]
    return "  ".join([*shown, f"{found.get('time/images_per_second', 0):.0f} img/s"])


def mean_of_last(history: list[dict[str, float]], key: str = "test/top1", count: int = 10) -> float:
    return float(np.mean([past[key] for past in history[-count:]]))
