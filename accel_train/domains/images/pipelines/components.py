"""Components of a pipeline on disk, loaded one by one, without the chatter of diffusers and transformers.

An unusable component is refused by name before anything is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from accel_train.config import UsageError, expand_path
from accel_train.domains.images.pipelines.family import INDEX
from accel_train.domains.models.pretrained import UNREAD, near_folder, refuse_missing, without_notices_of_imports
from accel_train.store import strict_json

LIBRARIES = ("diffusers", "transformers")
"""Libraries allowed for the class of a component. A pipeline with code of its own is not loaded."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of peft beside adapters."""
CONFIG = "config.json"
REMEDY = "download the base again, or give another --base.source"
PROBE = "a red flag, two dogs"
KNOWN_AT_LEAST = 2
"""Fewest known tokens of the probe. Without its vocabulary a T5 tokenizer knows only the space, others nothing."""
LONGEST = 10**9
"""Largest length of a tokenizer, in tokens. One without a length has 10**30."""


def refuse_other_folder(folder: Path, source: str) -> None:
    """Raise ``UsageError`` for a folder that holds no pipeline, such as one of its components."""
    if (folder / INDEX).exists():
        return
    refuse_adapters(folder, source)
    remedy = "give a folder that save_pretrained of a pipeline wrote, or a Hub id"
    if (folder.parent / INDEX).is_file():
        remedy = f"it is a component of the pipeline in the folder above; give --base.source {folder.parent}"
    raise UsageError(f"base.source {source!r}: the folder has no {INDEX}, so it is not a diffusers pipeline; {remedy}")


def refuse_adapters(folder: Path, source: str) -> None:
    """Raise ``UsageError`` for a folder of adapters given as a base."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = _read(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE"
        raise UsageError(
            f"base.source {source!r}: {folder} holds adapters ({ADAPTER_CONFIG}), not a whole pipeline; to "
            f"train them further, give --base.source {base} --init_from {source}; or export their run with accel-train "
            "export RUN FOLDER --merged, and give FOLDER"
        )


def not_loaded(source: str, error: Exception) -> str:
    """Return the message for a pipeline that cannot be loaded. A folder that is probably meant comes first."""
    path = expand_path(source)
    missing = ""
    if "/" in source and not path.exists() and path.parent.is_dir():
        missing = f": there is no folder {path}{near_folder(source)}. As a Hub id it"
    return (
        f"base.source {source!r}{missing} cannot be loaded ({type(error).__name__}: "
        f"{' '.join(str(error).split())[:200]}). The Hub id or folder of a diffusers pipeline, with {INDEX} and "
        "safetensors weights, is required (without a network it must be in the cache)."
    )


@contextmanager
def quiet() -> Generator[None]:
    """Silence diffusers and transformers: no progress bars, no notices of omissions or of optional packages."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    level = of_diffusers.get_verbosity()
    of_diffusers.set_verbosity_error()
    # Bars that are off already stay off behind this block.
    with_bars = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in with_bars:
        library.disable_progress_bar()
    try:
        with without_notices_of_imports():
            yield
    finally:
        of_diffusers.set_verbosity(level)
        for library in with_bars:
            library.enable_progress_bar()


def largest_picture(directory: Path, denoiser: str) -> tuple[int, int] | None:
    """Return height and width in pixels of the largest picture that a pipeline has positions for. None if no limit."""
    config, vae = (_read(directory / component / CONFIG) for component in (denoiser, "vae"))
    positions = config.get("pos_embed_max_size")
    if not isinstance(positions, int):
        return None
    side = positions * int(config.get("patch_size", 1)) * 2 ** (len(vae["block_out_channels"]) - 1)
    return side, side


def _read(file: Path) -> dict[str, Any]:
    try:
        return strict_json.read_object(file)
    except (OSError, ValueError):  # its loader reports what is wrong
        return {}


@contextmanager
def reading(source: str, folder: Path, file: str) -> Generator[None]:
    """Turn every failure of reading a component into a ``UsageError`` that names its file."""
    try:
        with quiet():
            yield
    except (UsageError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # failures of files, configs and constructors have no common type
        raise UsageError(
            f"base.source {source!r}: its {folder.name} cannot be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). A complete {folder / file} and matching files "
            f"beside it are required: {REMEDY}"
        ) from None


def find_class(source: str, index: Path, component: str, kind: Sequence[Any]) -> Any:
    """Return the class of a component. ``kind`` is its library and name in the pipeline's ``index``."""
    found = None
    if kind[0] in LIBRARIES:
        found = getattr(import_module(kind[0]), str(kind[1]), None)
    if found is None:
        raise UsageError(
            f"base.source {source!r}: {index} names {kind[0]}.{kind[1]} as the {component}; an installed class of "
            f"{' or '.join(LIBRARIES)} is required. {REMEDY.capitalize()}"
        )
    return found


def require_config(source: str, folder: Path, file: str) -> None:
    """Raise ``UsageError`` unless ``file`` in a component's folder is a JSON object with values.

    Where it is absent, transformers would take defaults, and diffusers would look for it on the Hub.
    """
    path = folder / file
    why = "it is not a JSON object with values"
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found:
            return
    except OSError as error:
        why = "it is not there" if isinstance(error, FileNotFoundError | NotADirectoryError) else str(error)
    except ValueError as error:
        why = f"it is not JSON: {error}"
    raise UsageError(f"base.source {source!r}: its {folder.name} needs {path}, and {why}. {REMEDY.capitalize()}")


def load_model(kind: Any, source: str, folder: Path, **options: Any) -> Any:
    """Load a denoiser, VAE or text encoder of class ``kind``, with all of its tensors from its files."""
    require_config(source, folder, "config.json")
    with reading(source, folder, "config.json"):
        model, found = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    unread = UNREAD if folder.name.startswith("text_encoder") else ()
    refuse_missing(f"base.source {source!r}: its {folder.name} in {folder}", model, found["missing_keys"], unread)
    return model


def load_scheduler(kind: Any, source: str, folder: Path) -> Any:
    require_config(source, folder, "scheduler_config.json")
    with reading(source, folder, "scheduler_config.json"):
        return kind.from_pretrained(folder)


def load_tokenizer(kind: Any, source: str, folder: Path, encoder: Any) -> Any:
    """Load a tokenizer. Raises ``UsageError`` if it has no vocabulary, or does not fit its text encoder, if any.

    If the files of its vocabulary are missing, transformers still builds a tokenizer, to which every word is unknown.
    """
    with reading(source, folder, "tokenizer.json"):
        loaded: Any = kind.from_pretrained(folder)
        # A processor has one inside.
        tokenizer = getattr(loaded, "tokenizer", loaded)
        ids = tokenizer(PROBE, verbose=False).input_ids
        known = {*ids} - {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    present = ", ".join(sorted(path.name for path in folder.glob("*") if path.is_file())) or "no file"
    named = f"base.source {source!r}: its {folder.name} in {folder}, which has {present},"
    if len(known) < KNOWN_AT_LEAST:
        raise UsageError(
            f"{named} knows {len(known)} tokens of {PROBE!r}; its vocabulary is required, a tokenizer.json (or "
            f"vocab.json and merges.txt, or spiece.model). {REMEDY.capitalize()}"
        )
    _refuse_misfit(named, tokenizer, ids, encoder)
    return loaded


def _refuse_misfit(named: str, tokenizer: Any, ids: list[int], encoder: Any) -> None:
    """Raise ``UsageError`` for tokens beyond an encoder's embeddings, and for a CLIP tokenizer without its length."""
    if encoder is not None:
        size = encoder.get_input_embeddings().num_embeddings
        if max(ids) >= size:
            raise UsageError(
                f"{named} has the token {max(ids)}, and the text encoder has {size} embeddings. The "
                f"tokenizer of this encoder is required: {REMEDY}"
            )
    # CLIP's pipelines pad every caption to the length of the tokenizer.
    if type(tokenizer).__name__.startswith("CLIP"):
        longest = getattr(getattr(encoder, "config", None), "max_position_embeddings", LONGEST)
        if tokenizer.model_max_length > longest:
            raise UsageError(
                f"{named} has a model_max_length of {tokenizer.model_max_length:g} tokens; at most "
                f"{longest:,} are possible. Its tokenizer_config.json, with a model_max_length, is required: {REMEDY}"
            )
