"""Start the process group once all processes have arrived, started in the same way."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.distributed import PrefixStore, TCPStore

from accel_train.config import launched_processes
from accel_train.launch_files import interfaces
from accel_train.runtime.early_stop import EARLY
from accel_train.runtime.exiting import current_run
from accel_train.runtime.hosts.leaving import Others
from accel_train.runtime.hosts.meeting import meeting
from accel_train.runtime.hosts.same_start import Facts, facts_of_start, launch_settings

if TYPE_CHECKING:
    from accel_train.launch_files.requested import Requested


def connect(
    requested: Requested, config: object, plugin: DeepSpeedPlugin | None, timeout: timedelta, *, cpu: bool
) -> None:
    """Start the process group with our timeout. All ranks.

    Raises ``UsageError`` on every rank if one has a different ``config`` (None is not compared), ``plugin``, code or
    number of processes, and ``MissingProcessError`` if one does not arrive.
    """
    # DeepSpeed's later subgroups read their timeout, in minutes, from the environment (accelerate#3711).
    minutes = math.ceil(timeout.total_seconds() / 60)
    os.environ["DEEPSPEED_TIMEOUT"] = str(max(1, minutes))
    interfaces.share_with_gloo(os.environ)
    with meeting(_facts(requested, config, plugin), timeout) as attempt:
        _connect(requested, attempt, timeout, cpu=cpu)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        current_run.callback(_hold, dist.group.WORLD)
    # Only a recipe under `run_main` leaves before its first step.
    if attempt is not None and EARLY.installed:
        EARLY.hear(_others(attempt, timeout))


def _hold(group: object) -> None:
    """Do nothing. As a callback with the process group as its argument, this keeps the group until ``main`` has ended.

    Otherwise DDP's reducer would hold it last, and free it under the GIL. That waits for gloo's threads, which need the
    GIL to free what they have gathered (torch 2.13): some runs that end right after a collective would hang.
    """


def _connect(requested: Requested, attempt: str | None, timeout: timedelta, *, cpu: bool) -> None:
    if requested.rehearsal:
        # Imported late, because a real run does not need it.
        from accel_train.runtime import rehearsal

        rehearsal.connect(requested.strategy, timeout)
        return
    # `InitProcessGroupKwargs` would drop a timeout that equals its own default (accelerate#2611).
    store: dict[str, Any] = {}
    # DeepSpeed connects by itself.
    if requested.strategy != "deepspeed":
        store = _store_of(attempt, timeout)
    PartialState(cpu=cpu, timeout=timeout, **store)


def _others(attempt: str, timeout: timedelta) -> Others:
    world_size = int(os.environ["WORLD_SIZE"])
    store = PrefixStore(f"accel_train/{attempt}/stop", _shared_store(world_size, timeout))
    return Others(store, world_size, os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _shared_store(world_size: int, timeout: timedelta) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, world_size, is_master=False, timeout=timeout)


def _facts(requested: Requested, config: object, plugin: DeepSpeedPlugin | None) -> Facts:
    # One process has nobody to differ from.
    if launched_processes(os.environ) == 1:
        return {}
    deepspeed = None if plugin is None else plugin.deepspeed_config
    settings = launch_settings(requested.strategy, os.environ, deepspeed)
    known = {} if config is None else facts_of_start(config)
    return {"launch settings": settings, **known}


def _store_of(attempt: str | None, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of ``init_process_group`` for several processes that meet at torchrun's store, else none.

    That store outlives its processes: after a restart it still holds the addresses of those that have ended, and torch
    2.13 reads them again. New processes would wait for the old ones until the timeout.
    """
    # A store held by process 0 ends with it, and needs no prefix.
    if attempt is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    world_size = int(os.environ["WORLD_SIZE"])
    return {
        "store": PrefixStore(f"attempt_{attempt}", _shared_store(world_size, timeout)),
        "rank": int(os.environ["RANK"]),
        "world_size": world_size,
    }
