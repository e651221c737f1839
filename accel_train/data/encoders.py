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

from accel_train.config import UsageError
from accel_train.data.tfidf import VERSION as TFIDF_VERSION
from accel_train.data.tfidf import TfidfSvdEncoder

VERSION = "transformers-1"
Pooling = Literal["mean", "cls", "last"]
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
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
    max_length: int = 256
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
        facts = [VERSION, self.files_hash, self.pooling, self.normalise, self.max_length, self.dim]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:
            raise unreadable(self.name, error) from None

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
        return load_model(self.name, self.folder, self._config, self.device), load_tokenizer(self)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, Dz) float32 of one batch; texts are cut to `max_length` tokens."""
        model, tokenizer = self._loaded
        inputs = tokenizer(
            list(texts), max_length=self.max_length, truncation=True, padding=True, return_tensors="pt"
        ).to(self.device)
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
            "name": self.name,
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


def model_folder(name: str) -> Path:
    """The local directory of a model: itself, or the hub's snapshot (downloaded once)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
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


def load_model(name: str, folder: Path, config: Any, device: str) -> Any:
    """The text encoder in float32, evaluation mode; of an encoder-decoder the encoder. Weights that would be
    random because the checkpoint lacks them are refused (but for the pooler and a decoder, which are not used)."""
    from transformers import AutoModel

    try:
        model, report = AutoModel.from_pretrained(
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
    encoder = model.get_encoder() if config.is_encoder_decoder else model
    return encoder.eval().requires_grad_(False).to(device)


def _keys(report: Iterable[Any]) -> Iterable[str]:
    return (entry if isinstance(entry, str) else entry[0] for entry in report)


def load_tokenizer(encoder: TransformerEncoder) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(encoder.folder, trust_remote_code=False)
    except Exception as error:
        raise unreadable(encoder.name, error) from None
    if tokenizer.pad_token is None:  # padding is not attended: any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_encoder(directory: Path, device: str = "cpu") -> LatentEncoder | None:
    """The encoder that `save` left in a directory; None where latents were ready-made."""
    if not (directory / "encoder.json").exists():
        return None
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
