"""Source of a language model, a Hub id or a folder: its commit, and the files of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.domains.language.pretrained import UNREAD, ModelConfig, not_loaded
from accel_train.domains.models.lora import LoraConfig
from accel_train.store.pretrained_base import COMMIT, PretrainedBase, TrainedBase


def at_commit(options: ModelConfig) -> ModelConfig:
    """Return the options with the commit of a branch or tag on the Hub, so that all files are of one. One process.

    Without a network it is the one in the cache. Raises ``UsageError`` for a source that cannot be read, and for
    adapters, which transformers would put on another model.
    """
    from transformers.utils import CONFIG_NAME, find_adapter_config_file
    from transformers.utils.hub import cached_file, extract_commit_hash

    source = options.source
    if source is None:
        return options
    _refuse_run(source)
    if not Path(source).is_dir() and not COMMIT.fullmatch(options.revision or ""):
        try:
            found = cached_file(
                source, CONFIG_NAME, revision=options.revision, _raise_exceptions_for_missing_entries=False
            )
        except Exception as error:  # failures of hub, network and files have no common type
            raise UsageError(not_loaded(source, error)) from None
        # Without a config there is no commit: its reader says what is missing.
        options = replace(options, revision=extract_commit_hash(found, None) or options.revision)
    if find_adapter_config_file(source, revision=options.revision) is not None:
        raise UsageError(
            f"--model.source {source!r} contains adapters (adapter_config.json), not a whole model. Merge them into "
            "their base first (peft: merge_and_unload, save_pretrained; a run of this recipe: accel-train export RUN "
            "FOLDER --merged), or give that base."
        )
    return options


def _refuse_run(source: str) -> None:
    """Raise ``UsageError`` for a directory of a run, whose model is in its checkpoints."""
    found = sorted((Path(source) / "checkpoints").glob("checkpoint_*"))
    if found and not (Path(source) / "config.json").is_file():
        raise UsageError(f"--model.source {source!r} is the directory of a run; give a checkpoint of it: {found[-1]}")


def base_of(options: ModelConfig, adapters: LoraConfig) -> PretrainedBase | TrainedBase | None:
    """Return the files of the frozen weights, or the commit of a source on the Hub that is trained as a whole.

    ``options`` are those of ``at_commit``. Returns None without a source, and for a folder that is trained as a whole.
    Raises ``UsageError`` if the files are gone.
    """
    if options.source is None:
        return None
    if adapters.rank == 0:
        # A folder has no revision.
        return TrainedBase(options.source, options.revision) if options.revision else None
    return find_base(options.source, options.revision)


def find_base(source: str, revision: str | None) -> PretrainedBase:
    """Return the files with the weights of a folder or Hub id, and its config. Raises ``UsageError``."""
    from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, extract_commit_hash, get_checkpoint_shard_files

    try:
        single = cached_file(source, SAFE_WEIGHTS_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
        files: Any = [single]
        if single is None:
            # Large models are stored in several files, and an index names them.
            index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
            files, _ = get_checkpoint_shard_files(source, index, revision=revision)
        config = cached_file(source, CONFIG_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # failures of hub, network and files have no common type
        raise UsageError(not_loaded(source, error)) from None
    paths = [Path(file) for file in files]
    names = tuple(path.name for path in paths)
    named = source
    if Path(source).is_dir():
        # A run may be loaded from another directory than it was started in.
        named = str(Path(source).absolute())
    else:
        # The commit of a branch or tag.
        revision = extract_commit_hash(files[0], None) or revision
    definition = () if config is None else (CONFIG_NAME,)
    return PretrainedBase(named, paths[0].parent, names, revision, definition, unread=UNREAD)
