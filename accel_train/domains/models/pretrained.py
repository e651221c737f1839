"""Load weights from a directory or the Hub, for `from_pretrained` of every model here, and config.json."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import load_torch_model, snapshot_download
from torch import nn

from accel_train.config import UsageError, expand_path
from accel_train.store import strict_json
from accel_train.wording import did_you_mean, nearest, shortened

DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Options passed by the hub mixin to `_from_pretrained` besides the model's own arguments."""
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]
SHOWN_TENSORS = 3
ORDINARY_AT_LEAST = 2
"""Fewest tokens that are not special. A T5 tokenizer without its vocabulary still has one, for the space."""
UNREAD = ("lm_head.",)
"""Output layer of a language model. As a text encoder, the model is read before it."""


OF_OPTIONAL_PACKAGES = ("bitsandbytes", "torchao", "torch.utils._pytree", "transformers.utils.import_utils")
"""Loggers that report missing optional packages and kernels at an import. A run that needs one is refused with its
name. In any other run these are ten lines of noise before the first line of its own.
"""


@contextmanager
def without_notices_of_imports() -> Generator[None]:
    """Silence what transformers' import of its models logs about optional packages."""
    loggers = [logging.getLogger(name) for name in OF_OPTIONAL_PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    # A filter, because DeepSpeed sets the level of its logger while it is imported.
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.addFilter(_is_error)
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_error)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def without_bars_in_logs() -> Generator[None]:
    """Silence transformers' progress bars unless stderr is a terminal: a log file would keep every step of them."""
    from transformers.utils import logging as of_transformers

    silenced = not sys.stderr.isatty() and of_transformers.is_progress_bar_enabled()
    if silenced:
        of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if silenced:
            of_transformers.enable_progress_bar()


def near_folder(name: str) -> str:
    """Return a did-you-mean hint for a missing path with a name close to a folder beside it, else an empty string."""
    path = expand_path(name)
    if path.exists() or not path.parent.is_dir():
        return ""
    meant = nearest(path.name, [child.name for child in path.parent.iterdir() if child.is_dir()])
    return did_you_mean(None if meant is None else str(Path(name).with_name(meant)))


def load_pretrained(
    model: nn.Module, model_id: str, map_location: str = "cpu", strict: bool = True, **download_options: Any
) -> None:
    """Load one weights file, or several with an index. The hub mixin's own loader cannot read several.

    Strict, unlike the mixin's default: weights missing from the files would silently stay random. If `model_id` is a
    directory, nothing is downloaded. Otherwise `download_options` go to `snapshot_download`.
    """
    directory = model_id
    if not Path(model_id).is_dir():
        directory = snapshot_download(model_id, allow_patterns=WEIGHT_FILES, **download_options)
    load_directory(model, Path(directory), "model", map_location, strict)


def load_directory(
    model: nn.Module,
    directory: Path,
    stem: str,
    map_location: str = "cpu",
    strict: bool = True,
) -> None:
    """Load the weights (``model``) or their EMA (``ema``) of a directory, from one file or several with an index."""
    single = directory / f"{stem}.safetensors"
    # A single file is passed by name, because the directory may hold both the weights and their EMA.
    source = single if single.is_file() else directory
    pattern = stem + "{suffix}.safetensors"
    load_torch_model(model, source, strict=strict, map_location=map_location, filename_pattern=pattern)


def refuse_missing(named: str, model: nn.Module, missing: Iterable[str], unread: tuple[str, ...] = ()) -> None:
    """Raise ``UsageError`` for tensors of ``model`` that its files lack: the library only warns and leaves them random.

    ``missing`` is from the library's loading info, so tied tensors are not among it. ``named`` begins the message.
    Tensors with a name that begins with ``unread`` are set to zero instead, so that every process and start agrees.
    """
    names = sorted(missing)
    needed = [name for name in names if not name.startswith(unread)] if unread else names
    if needed:
        raise UsageError(
            f"{named}: its files lack tensors ({len(needed):,}), which would stay random: "
            f"{shortened(needed, SHOWN_TENSORS)}. All of them are required; download it again, or give another one"
        )
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).zero_()


def refuse_empty_vocabulary(named: str, tokenizer: Any) -> None:
    """Raise ``UsageError`` for a tokenizer that has only special tokens. ``named`` begins the message.

    transformers builds one if the files of the vocabulary are missing, and then all texts are the same.
    """
    ordinary = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}
    if len(ordinary) < ORDINARY_AT_LEAST:
        raise UsageError(
            f"{named}: its tokenizer has no vocabulary ({len(ordinary)} tokens that are not special). A "
            "tokenizer.json, or the files that it is made of (vocab.json and merges.txt, vocab.txt, spiece.model), "
            "is required; download it again"
        )


def config_hash(*modules: nn.Module) -> str:
    """Hash the classes and configs of modules of diffusers and transformers: what determines outputs besides weights.

    Without defaults, private keys and versions of libraries, so that another library version finds the same.
    """
    described = [[type(module).__name__, _given_config(module)] for module in modules]
    # As JSON has it: a config may hold tuples and dtypes.
    return strict_json.json_sha256(json.loads(json.dumps(described, default=str)))


def _given_config(module: nn.Module) -> Mapping[str, Any]:
    config: Any = getattr(module, "config", {})
    if hasattr(config, "to_diff_dict"):
        return config.to_diff_dict()
    # diffusers lists the names for which its config had no value.
    defaults = config.get("_use_default_values", ())
    return {name: value for name, value in config.items() if name not in defaults}


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a directory. Raises ``UsageError`` for one that cannot be read."""
    path = directory / "config.json"
    try:
        return strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy") from None
