"""Keeps torch from Intel's matrix unit (AMX) where the processor names it but cannot use it.

Some virtual machines announce AMX and then end the process with "illegal instruction" at its first product of half-precision
matrices. Nothing but trying tells, so a child process tries. oneDNN, which does torch's half-precision work on a CPU, reads
its limit from the environment at its first operation; so the trial must come before that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

LIMIT = "ONEDNN_MAX_CPU_ISA"
BEST_WITHOUT = "AVX512_CORE_BF16"  # the next one adds fp16 in fp16, which loses digits
SECONDS = 20.0  # for a product of two small matrices; a child that takes longer hangs
CPUINFO = Path("/proc/cpuinfo")


def avoid_broken_amx() -> bool:
    """Whether AMX had to be switched off. A limit that somebody has set stays."""
    if LIMIT in os.environ or not _announced():
        return False
    if _survives(_multiply):
        return False
    os.environ[LIMIT] = BEST_WITHOUT
    return True


def _announced() -> bool:
    try:
        return "amx_tile" in CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False


def _multiply() -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist here
    ones = torch.ones(64, 256, dtype=torch.bfloat16)
    if float((ones @ ones.T)[0, 0]) != 256:
        raise ArithmeticError


def _survives(work: Callable[[], None]) -> bool:
    """Whether a copy of this process gets through `work`."""
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS):
                signal.signal(number, signal.SIG_DFL)  # no traceback: this end is expected
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
