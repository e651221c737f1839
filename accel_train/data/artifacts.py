"""Small fitted things in the cache (tokenizer, TF-IDF encoder): complete and verified folders, or rebuilt."""

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import cast

from accel_train.config import UsageError

SEAL = "sha256.json"


def cache_directory(option: str | None) -> Path:
    """The option, else $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train; created, and refused where it cannot be."""
    value = option or os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train"
    folder = Path(os.path.expandvars(os.path.expanduser(value))).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error)
    else:
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    raise UsageError(
        f"--data.cache_dir {value!r}: {folder} cannot be used ({reason}). A folder that this process may create "
        "and write is required; set the option or ACCEL_TRAIN_CACHE."
    )


def open_cache(option: str | None, rank: int, world_size: int) -> Path:
    """`cache_directory` of this process; rank 0 prints which hosts have another one. Collective, as `hosts_without`."""
    cache = cache_directory(option)
    if (apart := hosts_without(cache, rank, world_size)) and rank == 0:
        print(apart, flush=True)
    return cache


def hosts_without(cache: Path, rank: int, world_size: int) -> str | None:
    """Which hosts do not see rank 0's `cache`, in a sentence with the remedy; None where all do. Every rank calls it.

    Collective where several processes are connected. Each host's own processes share what it has.
    """
    from torch import distributed

    if world_size == 1 or not distributed.is_available() or not distributed.is_initialized():
        return None
    name = [f".rank_0.{uuid.uuid4().hex}.probe"]  # new each time: a network file system remembers what was not there
    if rank == 0:
        (cache / name[0]).touch()
    distributed.broadcast_object_list(name, src=0)
    probe = cache / name[0]
    mine, everyone = (socket.gethostname(), str(cache), probe.exists()), [None] * world_size
    distributed.all_gather_object(everyone, mine)
    if rank == 0:
        probe.unlink()
    found = cast("list[tuple[str, str, bool]]", everyone)
    apart = sorted({f"{host} ({folder})" for host, folder, sees in found if not sees})
    if not apart:
        return None
    return (
        f"--data.cache_dir: {', '.join(apart)} does not see {cache} of {found[0][0]}, so each makes what is kept "
        "there (data, latents) for itself; give --data.cache_dir a folder that all hosts share to make it once"
    )


def cached_folder(
    folder: Path, write: Callable[[Path], None], *, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> Path:
    """`folder` holding what `write(directory)` puts there. Every rank calls it (two barriers): rank 0 builds,
    then any process that does not see the folder (another host's disk) builds its own."""
    for turn in (rank == 0, True):
        if turn and not intact(folder):
            _build(folder, write)
        barrier()
    return folder


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    part = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    (part / SEAL).write_text(json.dumps(_hashes(part)), "utf-8")
    try:
        part.rename(folder)
    except OSError:  # there already: another process was faster, or what is there is damaged
        if not intact(folder):
            shutil.rmtree(folder)
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)


def intact(folder: Path) -> bool:
    """Exactly the files that were written, with their hashes."""
    try:
        return json.loads((folder / SEAL).read_text("utf-8")) == _hashes(folder)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.iterdir() if file.name != SEAL)
    return {file.name: _hash(file) for file in files}


def _hash(file: Path) -> str:
    """Read in pieces: generated fields may be larger than the memory that all processes of a host have."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
