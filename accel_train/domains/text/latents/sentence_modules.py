"""Modules that a sentence-transformers model declares besides its transformer: its pooling, and further ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.domains.text.encoders import TransformerEncoder, local_folder, unreadable
from accel_train.store import strict_json

MODULES_FILE = "modules.json"
COMPUTED = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that are implemented here. Normalize is the option ``data.normalise``."""
POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


def refuse_other_modules(encoder: TransformerEncoder) -> None:
    """Raise ``UsageError`` if the model's pooling differs from the encoder's, or a module is not implemented here.

    Does nothing for a model without ``modules.json``. The pooling is not compared if its configuration cannot be found.
    """
    file = encoder.folder / MODULES_FILE
    if not file.is_file():
        return
    try:
        modules: Any = strict_json.read(file)
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: str(module["path"]) for module in modules}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(encoder.name, ValueError(f"{file}: {error}")) from None
    others = [kind for kind in kinds if kind not in COMPUTED]
    if others:
        raise UsageError(
            f"--data.encoder {encoder.name!r}: its {MODULES_FILE} declares {' and '.join(others)}, which is not "
            "computed here: latents would differ from those of sentence-transformers. Give a model with "
            f"{', '.join(COMPUTED)} only, or encode the texts yourself and give --data.latents."
        )
    declared = _declared_pooling(encoder, kinds.get("Pooling"))
    if declared is not None and declared != encoder.pooling:
        remedy = f"Give --data.pooling {declared}"
        if declared not in POOLINGS.values():
            remedy = "Encode the texts yourself and give --data.latents"
        raise UsageError(
            f"--data.pooling {encoder.pooling}: {encoder.name!r} was trained with {declared} pooling, as its "
            f"configuration says. {remedy}, or another encoder."
        )


def _declared_pooling(encoder: TransformerEncoder, path: str | None) -> str | None:
    """Return the pooling declared by the configuration in the folder ``path``, None if there is none to read."""
    if path is None:
        return None
    file = encoder.folder / path / "config.json"
    if not file.is_file() and local_folder(encoder.name) is None:
        from huggingface_hub import hf_hub_download

        try:
            # `model_folder` downloads no subfolders, so the configuration is fetched here.
            file = Path(hf_hub_download(encoder.name, f"{path}/config.json", revision=encoder.revision))
        except Exception:  # for example without a network: the model itself was found
            return None
    if not file.is_file():
        return None
    try:
        config: Mapping[str, Any] = strict_json.read_object(file)
    except ValueError as error:
        raise unreadable(encoder.name, ValueError(f"{file}: {error}")) from None
    if "pooling_mode" in config:
        return str(config["pooling_mode"]).removesuffix("token").removesuffix("_tokens")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return " and ".join(POOLINGS.get(mode, mode.removeprefix("pooling_mode_")) for mode in modes) or None
