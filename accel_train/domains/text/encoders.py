"""Latents from a transformers encoder, named by a Hub id or by a local directory with safetensors weights."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.data.artifacts import cache_if_usable
from accel_train.domains.models.pretrained import refuse_empty_vocabulary, without_notices_of_imports
from accel_train.domains.text.tfidf import VERSION as TFIDF_VERSION
from accel_train.domains.text.tfidf import TfidfSvdEncoder
from accel_train.store import strict_json
from accel_train.store.pretrained_base import sha256_of

VERSION = "transformers-1"
Pooling = Literal["mean", "cls", "last"]
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
ENCODER_FILE = "encoder.json"
LARGE = (".safetensors", ".model")
LARGE_BYTES = 10_000_000
"""The Hub identifies files of this size or of the kinds above by their sha256, and others by their git hash."""
MAX_LENGTH = 512
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class LatentEncoder(Protocol):
    """Text to latents. Encoders with equal `identity` give equal latents."""

    @property
    def identity(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def normalise(self) -> bool:
        """True: latents are scaled to length 1."""
        ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...
    def save(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class TransformerEncoder:
    """A transformers encoder in float32. The first `encode` loads the model, so a complete cache never loads it."""

    name: str
    pooling: Pooling = "mean"
    normalise: bool = True
    max_length: int | None = None
    """Maximum number of tokens read per text. None: the model's maximum, but at most MAX_LENGTH."""
    latent_dim: int | None = None
    """Number of leading dimensions to keep before normalisation (Matryoshka models). None: all."""
    batch_size: int = 64
    device: str = "cpu"
    weights_hash: str | None = None
    """Required hash of the model's files, set by a checkpoint's assets. Files with another hash are refused."""
    revision: str | None = None
    """Commit of a Hub id, taken from a checkpoint's assets or from rank 0. None: the newest."""

    @cached_property
    def folder(self) -> Path:
        return model_folder(self.name, self.revision)

    @property
    def commit(self) -> str | None:
        """Commit of a Hub id. None for a local directory."""
        # The Hub's cache names the folder of a snapshot after its commit.
        return self.folder.name if local_folder(self.name) is None else None

    @cached_property
    def files_hash(self) -> str:
        digest = hash_files(self.folder)
        if self.weights_hash not in (None, digest):
            raise UsageError(
                f"--data.encoder {self.name!r}: its files changed since the latents were made (sha256 "
                f"{digest[:12]}, was {str(self.weights_hash)[:12]}). Give the model that was used, or prepare the "
                "data again."
            )
        return digest

    @property
    def identity(self) -> str:
        # Device and batch size are left out, so that other machines can use the same cache.
        facts = [VERSION, self.files_hash, self.pooling, self.normalise, self._length, self.dim]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:
            raise unreadable(self.name, error) from None

    @cached_property
    def _length(self) -> int:
        tokenizer: dict[str, Any] = {}
        settings = self.folder / "tokenizer_config.json"
        if settings.exists():
            try:
                tokenizer = strict_json.read_object(settings)
            except ValueError as error:
                raise unreadable(self.name, ValueError(f"{settings}: {error}")) from None
        # The config of a multimodal model keeps the sizes of its text part in a nested config.
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        # Neither number can be trusted alone: transformers saves 1e30 for a tokenizer without a limit, and XLNet, which
        # has no limit, gives -1.
        given = (tokenizer.get("model_max_length"), positions)
        limits = [int(limit) for limit in given if isinstance(limit, int | float) and limit > 0]
        if self.max_length is None:
            return min([*limits, MAX_LENGTH])
        if limits and self.max_length > min(limits):
            raise UsageError(
                f"--data.encoder_max_length {self.max_length}: {self.name!r} reads at most {min(limits)} tokens. "
                f"Give 1 to {min(limits)}, or null for the most it can."
            )
        return self.max_length

    @property
    def dim(self) -> int:
        width: int = self._config.get_text_config().hidden_size
        if self.latent_dim is None:
            return width
        if self.latent_dim > width:
            raise UsageError(
                f"--data.latent_dim {self.latent_dim}: embeddings of {self.name!r} have {width} dimensions. Give 1 "
                f"to {width}, or null for all."
            )
        return self.latent_dim

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        # Computing the hash refuses changed weights before they are used.
        _ = self.files_hash
        model = load_model(self.name, self.folder, self._config)
        tokenizer = load_tokenizer(self.name, self.folder)
        return model.to(self.device), tokenizer

    def release(self) -> None:
        """Free the model's memory on the device. `encode` loads it again."""
        self.__dict__.pop("_loaded", None)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode one batch to (n, Dz) float32. Texts are cut to `max_length` tokens."""
        model, tokenizer = self._loaded
        inputs = tokenizer(
            list(texts),
            max_length=self._length,
            truncation=True,
            padding=True,
            return_tensors="pt",
        ).to(self.device)
        mask = inputs["attention_mask"]
        hidden: Tensor = model(input_ids=inputs["input_ids"], attention_mask=mask)[0]
        latents = pool(hidden.float(), mask.bool(), self.pooling)[:, : self.dim]
        if self.normalise:
            latents = torch.nn.functional.normalize(latents, dim=-1)
        return latents.cpu().numpy()

    def resumed(self, assets: Path | None) -> TransformerEncoder:
        """Return this encoder at the commit recorded in a checkpoint's assets, if they name the same model."""
        recorded: dict[str, Any] = {}
        if assets is not None:
            with suppress(OSError, ValueError):  # the resume skips a damaged checkpoint as well
                recorded = strict_json.read_object(assets / ENCODER_FILE)
        if recorded.get("kind") != VERSION or recorded.get("name") != self._place:
            return self
        return replace(self, revision=recorded.get("revision"))

    @property
    def _place(self) -> str:
        # A local name may be relative, and sampling may start in another directory.
        return str(local_folder(self.name) or self.name)

    def save(self, directory: Path) -> None:
        """Write encoder.json: the name, its commit, the hash of its files and the options. Weights are not copied."""
        facts = {
            "kind": VERSION,
            "name": self._place,
            "weights_hash": self.files_hash,
            "pooling": self.pooling,
            "normalise": self.normalise,
            "max_length": self.max_length,
            "latent_dim": self.latent_dim,
        }
        if self.commit is not None:
            facts["revision"] = self.commit
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (directory / ENCODER_FILE).write_text(text, "utf-8")


def pool(hidden: Tensor, attended: Tensor, pooling: Pooling) -> Tensor:
    """Pool hidden states (B, S, H) over attended positions (B, S) to (B, H). Padding may be on either side."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if pooling == "mean":
        weights = attended.to(hidden.dtype).unsqueeze(-1)
        count = weights.sum(1).clamp(min=1)
        return (hidden * weights).sum(1) / count
    # argmax finds the first attended position for cls, and the last one for last.
    order = attended.int() if pooling == "cls" else torch.where(attended, positions, -1)
    chosen = order.argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), chosen]


def local_folder(name: str) -> Path | None:
    """Return the path if ``name`` is a local directory, else None."""
    folder = expand_path(name)
    if folder.is_dir():
        return folder
    return None


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the local directory of a model: ``name`` itself, or the snapshot of a Hub id, downloaded once.

    ``revision`` is a commit, None the newest one. Raises ``UsageError`` if the Hub does not have the model.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        # Patterns match across slashes, and subfolders only hold the same weights in other formats, such as ONNX.
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(MODEL_FILES), ignore_patterns="*/*"))
    except Exception as error:
        raise UsageError(
            f"--data.encoder {name!r}: no such directory, and the hub answered {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}. Give 'tfidf-svd' (needs no network), a local model directory, or "
            "the id of a model on the hub or in the local cache."
        ) from None


def hash_files(folder: Path) -> str:
    """Hash configuration, tokenizer and weights with sha256.

    A file is read once, at about a second per GB, and its hash is cached until it changes. Raises ``UsageError``
    without safetensors weights.
    """
    matches = (folder.glob(pattern) for pattern in MODEL_FILES)
    files = sorted(set(itertools.chain.from_iterable(matches)))
    if not any(file.suffix == ".safetensors" for file in files):
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        held = "none"
        if pickled:
            held = f"only {', '.join(pickled)} (pickles can run code, and are never opened)"
        raise UsageError(
            f"--data.encoder: safetensors weights are required, but {folder} contains {held}. Load the model in your "
            "own program and save it with model.save_pretrained(DIR), or name another model."
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{sha256_of(file, cache_if_usable())}\n".encode())
    return digest.hexdigest()


def unreadable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"--data.encoder {name!r} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]}). A "
        "model that the installed transformers knows is required, with safetensors weights; code from a model's "
        "repository is never run."
    )


@without_notices_of_imports()
def load_model(name: str, folder: Path, config: Any) -> Any:
    """Load the text encoder in float32 and evaluation mode, without the decoder of an encoder-decoder.

    A checkpoint with missing weights is refused, because they would be random. Those of the unused pooler and decoder
    may be missing.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    # For encoder-decoders such as T5, AutoModel would load the decoder too.
    encoder_only = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    loader = AutoModelForTextEncoding if encoder_only else AutoModel
    try:
        model, report = loader.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise unreadable(name, error) from None
    unused: tuple[str, ...] = ("pooler.",)
    if config.is_encoder_decoder:
        unused = ("pooler.", "decoder.")
    missing = sorted(key for key in _keys(report["missing_keys"]) if not key.startswith(unused))
    if missing:
        raise UsageError(
            f"--data.encoder {name!r}: {len(missing)} weights are not in its files ({', '.join(missing[:3])}, "
            "...) and would be random. Give a complete checkpoint of this architecture."
        )
    if config.is_encoder_decoder and not encoder_only:
        model = model.get_encoder()
    return model.eval().requires_grad_(False)


def _keys(report: Iterable[Any]) -> Iterable[str]:
    for entry in report:
        yield entry if isinstance(entry, str) else entry[0]


def load_tokenizer(name: str, folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise unreadable(name, error) from None
    refuse_empty_vocabulary(f"--data.encoder {name!r}", tokenizer)
    # Padding is not attended to, so any token will do.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    # Right padding is also exact for absolute positions, and `pool` finds the last real token.
    tokenizer.padding_side = "right"
    return tokenizer


def load_encoder(directory: Path, device: str = "cpu") -> LatentEncoder:
    """Load the encoder saved in a directory by `save`."""
    facts: dict[str, Any] = json.loads((directory / ENCODER_FILE).read_text("utf-8"))
    kind = facts.pop("kind")
    if kind == TFIDF_VERSION:
        return TfidfSvdEncoder.load(directory, facts)
    if kind != VERSION:
        raise UsageError(
            f"{directory / ENCODER_FILE}: encoder of kind {kind!r}; this version reads {TFIDF_VERSION!r} and "
            f"{VERSION!r}. Use the accel_train that wrote it."
        )
    return TransformerEncoder(**facts, device=device)
