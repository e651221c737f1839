"""Latents of any transformers encoder: a hub id or a local directory with safetensors weights."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.text.tfidf import VERSION as TFIDF_VERSION
from accel_train.domains.text.tfidf import TfidfSvdEncoder

VERSION = "transformers-1"
Pooling = Literal["mean", "cls", "last"]
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
MAX_LENGTH = 512
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class LatentEncoder(Protocol):
    """Text to latents. `identity` names the function: equal identities give equal latents."""

    @property
    def identity(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...
    def save(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class TransformerEncoder:
    """Computes in float32. The model is loaded by the first `encode`: with a full cache it never is."""

    name: str
    pooling: Pooling = "mean"
    normalise: bool = True
    max_length: int | None = None
    """Tokens read of each text; None: what the model can read, at most MAX_LENGTH."""
    latent_dim: int | None = None
    """Keep the first dimensions only (Matryoshka models), before normalising."""
    batch_size: int = 64
    device: str = "cpu"
    weights_hash: str | None = None
    """Refuse a model whose files have another hash (set when read from a checkpoint's assets)."""

    @cached_property
    def folder(self) -> Path:
        return model_folder(self.name)

    @cached_property
    def files_hash(self) -> str:
        found = hash_files(self.folder)
        if self.weights_hash not in (None, found):
            raise UsageError(
                f"--data.encoder {self.name!r}: its files changed since the latents were made (sha256 "
                f"{found[:12]}, was {str(self.weights_hash)[:12]}). Give the model that was used, or prepare the "
                "data anew."
            )
        return found

    @property
    def identity(self) -> str:
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
        settings = self.folder / "tokenizer_config.json"
        own: dict[str, Any] = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        limits = [int(limit) for limit in (own.get("model_max_length"), positions) if limit]
        if self.max_length and self.max_length > min(limits, default=self.max_length):
            raise UsageError(
                f"--data.encoder_max_length {self.max_length}: {self.name!r} reads at most {min(limits)} tokens. "
                f"Give 1 to {min(limits)}, or null for the most it can."
            )
        return self.max_length or min([*limits, MAX_LENGTH])

    @property
    def dim(self) -> int:
        width: int = self._config.get_text_config().hidden_size
        if (self.latent_dim or 0) > width:
            raise UsageError(
                f"--data.latent_dim {self.latent_dim}: {self.name!r} gives {width} dimensions. "
                f"Give 1 to {width}, or null for all."
            )
        return self.latent_dim or width

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        _ = self.files_hash  # refuse other weights before they are used
        model = load_model(self.name, self.folder, self._config)
        return model.to(self.device), load_tokenizer(self.name, self.folder)

    def release(self) -> None:
        """Give its memory on the device back; `encode` loads it again."""
        self.__dict__.pop("_loaded", None)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, Dz) float32 of one batch; texts are cut to `max_length` tokens."""
        model, tokenizer = self._loaded
        inputs = tokenizer(list(texts), max_length=self._length, truncation=True, padding=True, return_tensors="pt").to(
            self.device
        )
        attended = inputs["attention_mask"].bool()
        hidden: Tensor = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        latents = pool(hidden.float(), attended, self.pooling)[:, : self.dim]
        if self.normalise:
            latents = torch.nn.functional.normalize(latents, dim=-1)
        return latents.cpu().numpy()

    def save(self, directory: Path) -> None:
        """encoder.json: the id, the hash of its files, the options. The weights stay where they are."""
        facts = {
            "kind": VERSION,
            "name": str(self.folder) if local_folder(self.name) else self.name,
            "weights_hash": self.files_hash,
            "pooling": self.pooling,
            "normalise": self.normalise,
            "max_length": self.max_length,
            "latent_dim": self.latent_dim,
        }
        (directory / "encoder.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), "utf-8")


def pool(hidden: Tensor, attended: Tensor, pooling: Pooling) -> Tensor:
    """(B, S, H), (B, S) bool -> (B, H): over attended positions, whichever side the padding is on."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if pooling == "mean":
        weights = attended.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    order = attended.int() if pooling == "cls" else torch.where(attended, positions, -1)
    chosen = order.argmax(1)  # the first, or the last, attended position
    return hidden[torch.arange(len(hidden), device=hidden.device), chosen]


def local_folder(name: str) -> Path | None:
    folder = expand_path(name)
    return folder if folder.is_dir() else None


def model_folder(name: str) -> Path:
    """The local directory of a model: itself, or the hub's snapshot (downloaded once)."""
    if folder := local_folder(name):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), ignore_patterns="*/*"))
    except Exception as error:
        raise UsageError(
            f"--data.encoder {name!r}: no such directory, and the hub answered {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}. Required is 'tfidf-svd' (needs no network), a local"
            " model directory, or a model id that the hub or the local cache has."
        ) from None


def hash_files(folder: Path) -> str:
    """sha256 over configuration, tokenizer and weights. A file of the hub's cache is a link to a blob named by
    its content, and is not read again; others are read once at each start (about a second per GB)."""
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        found = f"only {', '.join(pickled)} (pickles can run code, and are never opened)" if pickled else "none"
        raise UsageError(
            f"--data.encoder: safetensors weights are required, {folder} holds {found}. Load the model in a "
            "program of your own and model.save_pretrained(DIR) it, or name another model."
        )
    digest = hashlib.sha256()
    for file in files:
        blob = file.resolve()
        if file.is_symlink() and blob.parent.name == "blobs":
            content = blob.name
        else:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name}\0{content}\n".encode())
    return digest.hexdigest()


def unreadable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"--data.encoder {name!r} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]}). "
        "Required is a model that the installed transformers knows, with safetensors weights; code from a model's "
        "repository is never run."
    )


def load_model(name: str, folder: Path, config: Any) -> Any:
    """The text encoder in float32, evaluation mode; of an encoder-decoder the encoder. Weights that would be
    random because the checkpoint lacks them are refused (but for the pooler and a decoder, which are not used)."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    encoder_only = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    try:
        model, report = (AutoModelForTextEncoding if encoder_only else AutoModel).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise unreadable(name, error) from None
    unused = ("pooler.", "decoder.") if config.is_encoder_decoder else ("pooler.",)
    missing = sorted(key for key in _keys(report["missing_keys"]) if not key.startswith(unused))
    if missing:
        raise UsageError(
            f"--data.encoder {name!r}: {len(missing)} weights are not in its files ({', '.join(missing[:3])}, "
            "...) and would be random. Give a complete checkpoint of this architecture."
        )
    encoder = model.get_encoder() if config.is_encoder_decoder and not encoder_only else model
    return encoder.eval().requires_grad_(False)


def _keys(report: Iterable[Any]) -> Iterable[str]:
    return (entry if isinstance(entry, str) else entry[0] for entry in report)


def load_tokenizer(name: str, folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise unreadable(name, error) from None
    if tokenizer.pad_token is None:  # padding is not attended: any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"  # exact for absolute positions too; pooling looks for the last real token
    return tokenizer


def load_encoder(directory: Path, device: str = "cpu") -> LatentEncoder:
    """The encoder that `save` left in a directory."""
    facts: dict[str, Any] = json.loads((directory / "encoder.json").read_text("utf-8"))
    kind = facts.pop("kind")
    if kind == TFIDF_VERSION:
        return TfidfSvdEncoder.load(directory, facts)
    if kind != VERSION:
        raise UsageError(
            f"{directory / 'encoder.json'}: encoder of kind {kind!r}; this version reads {TFIDF_VERSION!r} and "
            f"{VERSION!r}. Use the accel_train that wrote it."
        )
    return TransformerEncoder(**facts, device=device)
