"""DeepSpeed, ZeRO stage 0 to 3. Only this module imports the package.

A DeepSpeed engine is bound to one set of trained parameters and one optimiser. It is opened at the first
step that needs it and closed when one of these changes (trainable parameters, the stage,
loaded state); closed means that the method is plain torch again, with whole weights, and the optimiser's state is
kept by name. What a checkpoint holds is read from the open engine, gathered over ranks, so it needs neither
ranks nor ZeRO stage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.hooks import RemovableHandle

from pipeline.config import Config
from pipeline.data.batch import Batch
from pipeline.distributed.world import World
from pipeline.engines.batchnorm import BatchNormStats
from pipeline.engines.engine import OptimizerState
from pipeline.engines.optimizers import (
    STATE,
    Tensors,
    make_optimizer,
    parameter_groups,
    saved_tensors,
    set_lr,
    state_names,
)
from pipeline.engines.parameters import parameters, require_gradients, trained_parameters
from pipeline.engines.zero_state import ZeroState
from pipeline.methods.base import Method, Stage
from pipeline.models.backbones import input_shape
from pipeline.models.network import Average
from shards.base.errors import UserError
from shards.base.settings import merge

BUCKET = 50_000_000  # elements per bucket, at most
RESERVED = {  # DeepSpeed keys that would take over what our own settings decide
    "train_batch_size": "data.batch",
    "train_micro_batch_size_per_gpu": "data.batch and optim.accumulate",
    "gradient_accumulation_steps": "optim.accumulate",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "fp16": "train.precision=fp16",  # these two would round the beliefs in a method's buffers, too
    "bf16": "train.precision=bf16",
}


class DeepSpeedEngine:
    def __init__(self, config: Config, method: Method, world: World) -> None:
        self.config, self.method, self.world = config, method, world
        self.deepspeed = _import(world)
        self.optim = config.optim
        self.own = _own_settings(config.deepspeed.config)
        try:
            settings = self.deepspeed.DeepSpeedConfig(self._settings(1))
        except Exception as error:  # of many kinds; the cause is a setting of the user
            reason = " ".join(str(error).split())
            raise UserError(f"deepspeed.config: DeepSpeed refuses {config.deepspeed.config}: {reason}") from None
        self.stage = int(settings.zero_optimization_stage)
        self.batchnorm_stats = BatchNormStats(method, world)
        self.inner: Any = None  # the open DeepSpeed engine
        self.untouched: list[tuple[nn.Module, set[str]]] = []  # attributes every module had before it was opened
        self.strides: dict[str, tuple[int, ...]] = {}  # of every parameter before it was opened
        self.hooks: list[RemovableHandle] = []
        self.tensors: Tensors = {}  # optimiser's state of parameters that are not in the open engine
        self.steps: dict[str, int] = {}  # done by every parameter, for adamw
        self.prefixes: tuple[str, ...] = ("",)
        self.trained: dict[str, nn.Parameter] = {}  # in the open engine
        self.scale = LossScale(enabled=config.train.precision == "fp16")
        self.nonfinite = 0

    # -- stages ----------------------------------------------------------------------------------------------

    def begin_stage(self, stage: Stage, resuming: bool) -> None:
        self.close()
        if stage.fresh_optimizer and not resuming:
            self.tensors, self.steps = {}, {}
        self.optim = stage.optim or self.config.optim
        self.set_trainable(stage.trainable)

    def set_trainable(self, prefixes: tuple[str, ...]) -> None:
        self.prefixes = prefixes
        if self.inner is not None and trained_parameters(self.method, prefixes).keys() != self.trained.keys():
            self.close()

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, lr: float) -> dict[str, Tensor]:
        if self.inner is None:
            self._open()
        self.batchnorm_stats.snapshot(batch)
        self.inner.set_gradient_accumulation_boundary(batch.last)
        if self.stage > 0:
            self.inner.optimizer.override_loss_scale(self.scale.value)
        losses = self.inner(batch)
        loss = losses["loss"] * batch.share
        self.inner.backward(loss if self.stage else loss * self.scale.value, scale_wrt_gas=False)
        if batch.last:
            self._update(lr)
        return {name: value.detach() for name, value in losses.items()}

    def _update(self, lr: float) -> None:
        set_lr(self.inner.optimizer, lr)
        stepped = self._step_plain() if self.stage == 0 else self._step_zero()
        if stepped and self.optim.name == "adamw":
            self.steps |= {name: self.steps.get(name, 0) + 1 for name in self.trained}
        self.nonfinite = 0 if stepped else self.nonfinite + 1
        self.scale.update(stepped)
        self.batchnorm_stats.commit(stepped)
        with self._whole_if_averaged():
            self.method.after_step()

    def _step_zero(self) -> bool:
        self.inner.step()  # does nothing, on all ranks, if the norm of the gradient is not finite
        return bool(self.inner.was_step_applied())

    def _step_plain(self) -> bool:
        """Stage 0 does not check gradients. They are equal on all ranks."""
        gradients = [p.grad for p in self.method.parameters() if p.grad is not None]
        if self.scale.value != 1:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        if not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            self.inner.zero_grad()
            return False
        self.inner.step()
        return True

    def nonfinite_steps(self) -> int:
        return self.nonfinite

    @contextlib.contextmanager
    def _whole_if_averaged(self) -> Iterator[None]:
        """ZeRO-3 keeps a part of each weight; a moving average needs them whole."""
        everything = [p for _, p in parameters(self.method)]
        needed = self.stage == 3 and any(isinstance(module, Average) for module in self.method.modules())
        with self.deepspeed.zero.GatheredParameters(everything, modifier_rank=0, enabled=needed):
            yield

    def dummy_forward(self, forward: Callable[[Tensor], object]) -> None:
        """Under ZeRO-3 a forward needs all ranks: one without pictures left uses zeros."""
        if self.stage == 3 and self.inner is not None:
            forward(torch.zeros(2, *input_shape(self.config), device=self.world.device))

    # -- open and close --------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.trained = trained_parameters(self.method, self.prefixes)
        require_gradients(self.method, self.trained)
        self.untouched = [(module, set(vars(module))) for module in self.method.modules()]
        self._lay_plain()
        # ZeRO flattens a group to one tensor, which counts its steps once.
        groups = parameter_groups(self.method, self.trained, self.optim, self.steps)
        # torch's fused AdamW, as in DDP: DeepSpeed's own one is compiled at the first start.
        optimizer = make_optimizer(groups, self.optim, fused=self.optim.name == "adamw")
        settings = self._settings(sum(p.numel() for p in self.trained.values()))
        self.inner = self.deepspeed.initialize(
            model=self.method, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        if self.stage == 0:
            self.inner.torch_autocast_z0_gradscaler = None
        else:
            # Its own scaler neither halves the scale after a skipped step nor undoes it before clipping.
            self.inner.optimizer.torch_autocast_gradscaler = None
        known = {key: self.tensors.get(key, {}) for key in state_names(self.optim)}
        self._state().write({key: {n: t.pop(n) for n in self.trained if n in t} for key, t in known.items()})

    def _state(self) -> ZeroState:
        return ZeroState(self.inner, self.deepspeed, self.stage, self.world, self.optim, self.trained)

    def _lay_plain(self) -> None:
        """Weights in the plain layout, which is all that DeepSpeed sends and flattens. A layer whose weight was
        channels_last gets its input so, which is what its weight would have done: it computes as before."""
        self.strides = {name: p.stride() for name, p in parameters(self.method)}
        for module in self.method.modules():
            for p in module.parameters(recurse=False):
                plain = p.detach().clone(memory_format=torch.contiguous_format)
                if plain.stride() != p.stride():
                    p.data = plain
                    self.hooks.append(module.register_forward_pre_hook(_channels_last))

    def close(self) -> None:
        """Make the method plain torch again, on every rank, with whole weights."""
        if self.inner is None:
            return
        weights, self.tensors = self.model_state_dict(), self._all_tensors()
        for hook in (self.inner.module_forward_pre_hook, self.inner.module_forward_post_hook, *self.hooks):
            hook.remove()
        self.hooks = []
        self.inner.destroy()
        self.inner, self.trained = None, {}
        names = {id(p): name for name, p in parameters(self.method)}
        for module, kept in self.untouched:
            # Parameters are made anew: attributes set by DeepSpeed must not stay.
            module._parameters = {
                key: p if p is None else self._new_parameter(names[id(p)], weights)
                for key, p in module._parameters.items()
            }
            for extra in set(vars(module)) - kept:
                del vars(module)[extra]

    def _new_parameter(self, name: str, weights: dict[str, Tensor]) -> nn.Parameter:
        """In the layout it had before."""
        weight = weights[name]
        laid = torch.empty_strided(weight.shape, self.strides[name], dtype=weight.dtype, device=self.world.device)
        return nn.Parameter(laid.copy_(weight), requires_grad=False)

    def _settings(self, numbers: int) -> dict[str, Any]:
        config, bucket = self.config, min(numbers + numbers % 2, BUCKET)  # it wants an even number
        precision = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.train.precision]
        rows = max(1, config.data.batch // self.world.size // config.optim.accumulate)
        block = {
            "train_micro_batch_size_per_gpu": rows,  # for its statistics only
            "gradient_accumulation_steps": 1,  # we set the boundary of a batch ourselves
            "gradient_clipping": self.optim.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": config.deepspeed.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
            "torch_autocast": {
                "enabled": config.train.precision != "fp32",
                "dtype": precision,
                # Layers whose gradients (and ZeRO-3 weights) travel in half precision: none, as in DDP.
                "lower_precision_safe_modules": [],
            },
        }
        return merge(block, self.own)

    # -- state, independent of ranks and engine --------------------------------------------------------------

    def optimizer_state_dict(self) -> OptimizerState:
        """Called by all ranks together."""
        state: OptimizerState = {"scaler": self.scale.state_dict(), "nonfinite_steps": self.nonfinite}
        state |= self._all_tensors()  # type: ignore[typeddict-item]
        return state | {"steps": dict(self.steps)} if self.optim.name == "adamw" else state

    def _all_tensors(self) -> Tensors:
        """Of the parameters in the open engine and of all others."""
        opened = self._state().read() if self.inner is not None else {}
        return {key: self.tensors.get(key, {}) | opened.get(key, {}) for key in STATE[self.optim.name]}

    def load_optimizer_state_dict(self, state: OptimizerState) -> None:
        self.close()
        # Copies, which do not hold the whole checkpoint in memory.
        self.tensors = {key: {n: t.clone() for n, t in known.items()} for key, known in saved_tensors(state).items()}
        self.steps = dict(state.get("steps", {}))
        self.scale.load_state_dict(state["scaler"])
        self.nonfinite = int(state["nonfinite_steps"])

    def model_state_dict(self) -> dict[str, Tensor]:
        """The method's state_dict with whole weights. Called by all ranks together."""
        out = self.method.state_dict()
        if self.stage == 3 and self.inner is not None:
            for name, parameter in parameters(self.method):
                with self.deepspeed.zero.GatheredParameters([parameter]):
                    out[name] = parameter.detach().cpu().clone()
        return out

    def load_model_state_dict(self, weights: dict[str, Tensor]) -> None:
        self.close()
        self.method.load_state_dict(weights)


class LossScale:
    """torch.amp.GradScaler's rule and state, where the host knows whether a step was taken."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.value, self.good = enabled, 2.0**16 if enabled else 1.0, 0
        self.rule = torch.amp.GradScaler("cpu", enabled=enabled)

    def update(self, stepped: bool) -> None:
        if not self.enabled:
            return
        self.good = self.good + 1 if stepped else 0
        if not stepped:
            self.value *= self.rule.get_backoff_factor()
        elif self.good == self.rule.get_growth_interval():
            self.value, self.good = self.value * self.rule.get_growth_factor(), 0

    def state_dict(self) -> dict[str, float]:
        return {**self.rule.state_dict(), "scale": self.value, "_growth_tracker": self.good} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.rule.load_state_dict(state)
            self.value, self.good = float(state["scale"]), int(state["_growth_tracker"])


def _channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    images = [isinstance(a, Tensor) and a.dim() == 4 for a in args]
    return tuple(a.contiguous(memory_format=torch.channels_last) if image else a for a, image in zip(args, images))


def _import(world: World) -> Any:
    """Import DeepSpeed with our device and our process group."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"engine=deepspeed needs DeepSpeed, which cannot be imported ({error}). "
            "Install it with `pip install evenhand[deepspeed]`, or set engine=ddp."
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # its calls, not ours
    # A kernel for inference that it would compile for minutes at the first start on a CPU machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():  # a single rank: a group of its own
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_init_required=None, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _own_settings(path: str) -> dict[str, Any]:
    """The user's JSON without its "auto" values."""
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"deepspeed.config: {path} cannot be read ({error.strerror}). Give the path of a JSON file."
        ) from None
    except ValueError as error:
        raise UserError(f"deepspeed.config: {path} is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f"deepspeed.config: {path} must hold one JSON object.")
    found = _without_auto(found)
    for key, setting in RESERVED.items():
        value = found.get(key)
        if value is not None and not (isinstance(value, dict) and value.get("enabled") is False):
            raise UserError(f"deepspeed.config: {path} sets {key}, which is decided by {setting}. Remove it there.")
    return found


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in kept.items() if value != "auto"}
