"""Whether a run fits into the memory there is, before it takes any."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.process.log import log
from pipeline.training.estimate import GB, Estimate, Part, standing
from shards.base.errors import UserError


def check_memory(config: Config, samples: int, classes: int, world: World) -> None:
    """Refuse a run that cannot fit, before it takes memory; warn of one that may not. Called by all ranks together."""
    try:
        found = standing(config, samples, classes, world.size)
    except UserError:
        raise
    except Exception as error:  # a method may look at values while it is made
        log.debug("memory is not checked: %s", error)
        return
    problems = [_gpu_problem(found, world), _host_problem(found, world)]
    every = [problem for part in world.all_gather_object(problems) for problem in part if problem]
    if refusals := [sentence for refused, sentence in every if refused]:
        raise UserError(refusals[0])
    for sentence in dict.fromkeys(sentence for _, sentence in every) if world.is_main else ():
        log.warning(sentence)


Problem = tuple[bool, str]  # whether the run is refused, and why


def _gpu_problem(found: Estimate, world: World) -> Problem | None:
    if world.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(world.device)
    return _problem(found.device, 1, f"on the GPU of rank {world.rank}", free, total)


def _host_problem(found: Estimate, world: World) -> Problem | None:
    """Of one machine; its first rank looks."""
    if world.local_rank:
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    parts = [Part(p.name, p.bytes * ranks) for p in found.host + (found.device if world.device.type == "cpu" else [])]
    return _problem(parts + (found.main if world.is_main else []), ranks, "in host memory", *host_memory())


def _problem(parts: list[Part], ranks: int, where: str, free: int, total: int) -> Problem | None:
    need = sum(part.bytes for part in parts)
    if need <= free:
        return None
    largest = sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes)[:3]
    named = ", ".join(f"{part.name} {part.bytes / GB:.1f} GB" for part in largest)
    of = f" for {ranks} ranks" if ranks > 1 else ""
    sentence = (
        f"This run needs at least {need / GB:.1f} GB {where}{of}, activations not counted; there are {total / GB:.1f} GB, "
        f"{free / GB:.1f} GB of them free. The largest parts: {named}. What helps: more ranks on more machines, "
        "engine=deepspeed deepspeed.stage=3, a smaller model.backbone, or another method. --estimate lists every part."
    )
    return need > total, sentence


def host_memory() -> tuple[int, int]:
    """(free, all) bytes this machine or container may use."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            bound, taken = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        free, total = min(free, max(bound - taken, 0)), min(total, bound)
    return free, total
