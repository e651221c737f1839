"""Options of the `data` group, and of sampling from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_train.config import (
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seed,
    UsageError,
    refuse_without_effect,
)
from accel_train.data.tables.ledger import Changed
from accel_train.data.tables.shards import is_shards
from accel_train.domains.text.encoders import Pooling

TFIDF_SVD = "tfidf-svd"
TRAINED = "trained"
FREE_TO_CHANGE = ("data.cache_dir", "data.cache_mib", "data.changed", "data.encoder_batch_size")
"""Options that a resume may change, because they do not change any sample."""

DECIDE_SHAPES = ("data.tokenizer", "data.vocab_size", "data.max_length", "data.encoder", "data.latent_dim")
"""Options that determine the shapes of the weights."""


@dataclass(frozen=True)
class DataConfig:
    """Source of texts and latents."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .txt, .parquet or .csv file, a folder of .jsonl and .txt files, a folder
    or glob of .parquet, .arrow or .jsonl shards, a folder written by dataset.save_to_disk, or a Hub id (owner/name,
    owner/name:configuration@revision). With pictures.latents: captioned pictures, 'emoji' or 'shapes'."""
    read: Literal["memory", "shards"] = "memory"
    """memory: hold all texts and tokens. shards: read .parquet, .arrow or .jsonl files by block (row group, record
    batch, 4,096 lines) and tokenise when needed, for data larger than memory."""
    shuffle_blocks: PositiveInt | None = None
    """Blocks per shuffle window: rows are shuffled within a window, and each epoch draws the order of blocks. Part of
    the order of samples. None: 16 with read shards, a full shuffle with read memory."""
    cache_mib: PositiveInt | None = None
    """With read shards: cache of decoded texts in MiB, per process and worker, and as much again for mapped latents. If
    a window of shuffle_blocks does not fit, blocks are read repeatedly. None: 256."""
    changed: Changed = "refuse"
    """Data that changed since the run began, such as added or removed rows. refuse: do not resume. allow: continue with
    tokenizer, encoder, mean and std of the checkpoint; its assets/ledger.json records which data were used from which
    step."""
    split: str = "train"
    """Split of a saved or Hub dataset. Files, and saved datasets of one part, have none."""
    text_column: str = "text"
    """Field or column of the text. With captioned pictures, text also matches a column named caption, and the names of
    a column of classes are the captions."""
    heldout_path: str | None = None
    """Held-out texts or pictures: any source accepted by `path`, or split=NAME, another split of `path`. Training texts
    or pictures found in it are left out. None: heldout_fraction of `path`."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of texts held out for evaluation, by a hash of their words; texts of one latent or picture are on one side.
    Not with heldout_path."""
    min_words: NonNegativeInt = 1
    """Minimum number of words. Shorter texts are left out."""
    max_bad_rows: NonNegativeInt = 0
    """Unusable rows (bad JSON, no text, not UTF-8) that may be left out. One more is an error that names its place."""
    tokenizer: str = TRAINED
    """'trained': a byte-level BPE of vocab_size pieces, trained on the training split. Otherwise the tokenizer of a
    transformers model, by Hub id or local directory."""
    vocab_size: PositiveInt = 2048
    """Pieces of the trained tokenizer, 300 or more."""
    max_length: PositiveInt = 32
    """Tokens per text: longer ones are cut, shorter ones padded. Compute grows with it. At least 1 more than the
    tokenizer's special tokens around a text ('trained': none). With 1, only the first token is learned."""
    encoder: str = TFIDF_SVD
    """Encoder of the latents: 'tfidf-svd' (fitted on the training split, needs no network), or a transformers encoder
    by Hub id or local directory with safetensors weights."""
    latent_dim: PositiveInt | None = None
    """Latent dimensions: the size of tfidf-svd (None: 64), or the leading dimensions kept of a transformers encoder
    (None: all)."""
    pooling: Pooling = "mean"
    """Pooling of a transformers encoder's token states to one latent: their mean, the first or the last."""
    normalise: bool = True
    """Scale each latent to length 1, after latent_dim."""
    encoder_max_length: PositiveInt | None = None
    """Maximum number of tokens that a transformers encoder reads per text. None: its maximum, but at most 512."""
    encoder_batch_size: PositiveInt = 64
    """Texts per forward of a transformers encoder. Affects speed and memory only."""
    latents: str | None = None
    """Folder of ready-made latent shards (.npy or safetensors), instead of an encoder. The rows of `path` are then
    JSONL objects with the fields shard and idx in addition to the text."""
    cache_dir: str | None = None
    """Cache of tokenizers, tokens, encoders and latents between runs. None: $ACCEL_TRAIN_CACHE, else
    ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        # Not refused as an option without effect: ignoring it would train on other latents.
        if self.read == "shards" and self.latents is not None:
            raise UsageError(
                f"data.read: shards, data.latents: {self.latents}: latents of your own are read into memory; give "
                "--data.read memory, or leave one of the two out"
            )
        if self.read == "memory":
            self._refuse(("cache_mib",), "read: memory", "give --data.read shards")
        if self.heldout_path is None and self.heldout_fraction == 0:
            raise UsageError(
                "--data.heldout_fraction 0 without --data.heldout_path leaves nothing to evaluate on. Set a "
                "fraction such as 0.04, or give a held-out source."
            )
        if self.heldout_path is not None and self.heldout_fraction:
            self._refuse(("heldout_fraction",), f"heldout_path: {self.heldout_path}")
        transformer_only = ("pooling", "encoder_max_length", "encoder_batch_size")
        if self.latents is not None:
            self._refuse(("encoder", "normalise", "latent_dim", *transformer_only), f"latents: {self.latents}")
        elif self.encoder == TFIDF_SVD:
            self._refuse(transformer_only, f"encoder: {TFIDF_SVD}", "give a transformers encoder")
        if self.tokenizer != TRAINED:
            self._refuse(("vocab_size",), f"tokenizer: {self.tokenizer}", f"set the tokenizer to {TRAINED}")

    @property
    def by_blocks(self) -> bool:
        """Return True if the texts are split by a pass over shards, even if they are then held in memory."""
        return self.read == "shards" or self.shuffle_blocks is not None or is_shards(self.path)

    def _refuse(self, names: Sequence[str], cause: str, instead: str | None = None) -> None:
        refuse_without_effect(self, "data", names, f"with data.{cause}", instead)


@dataclass(frozen=True)
class TextLatentOptions:
    """Sample text from texts or latents, latents from texts, pictures from captions, or captions of pictures.

    The answer to a prompt depends only on the prompt and the seed, not on other prompts of the same call.
    """

    prompt: tuple[str, ...] = ()
    """Captions to draw, each as a PNG file, by a model of captions and pictures. '' draws without a caption."""
    picture: tuple[str, ...] = ()
    """Picture files to caption, one line each, by a model of captions and pictures."""
    text: tuple[str, ...] = ()
    """Texts. Each is encoded, and a text is sampled from its latent; with --to latents, its latent is sampled."""
    text_file: str | None = None
    """File with a text per line, beside or instead of --text."""
    latents: str | None = None
    """File .safetensors with latents (B, L, Dz), or (B, Dz) for one token, in the encoder's units: text is sampled."""
    to: Literal["text", "latents"] = "text"
    """Modality to sample."""
    length: PositiveInt | None = None
    """Number of tokens of each sampled text or caption. None: estimated from its latent."""
    steps: PositiveInt | None = None
    """Forward passes per sample (twice as many with guidance). None: evaluation.text.steps or evaluation.latent.steps
    of the run."""
    temperature: NonNegativeFloat | None = None
    """Temperature of sampled tokens: 1 samples the learned distribution, 0 takes the most likely token. None:
    evaluation.text.temperature of the run."""
    guidance: NonNegativeFloat | None = None
    """Strength of the condition; 1 is as learned. None: that of the run."""
    seed: Seed = 0
    """Seed of the noise. Another seed gives another answer to the same prompt."""
    encoder: str | None = None
    """Folder or Hub id of the text encoder used in training, if it has moved. Its files must be the same."""
    vae: str | None = None
    """Folder or Hub id of the autoencoder used in training, if it has moved. Its weights must be the same."""
    device: str = "cpu"
    """Device of torch."""
    output: str | None = None
    """File to write. Latents: by default latents.safetensors. Texts: always printed, and written one per line if given.
    Pictures: a folder, by default pictures."""

    def __post_init__(self) -> None:
        if self.prompt:
            self._refuse_beside_prompt()
            return
        if self.picture:
            self._refuse_beside_picture()
            return
        if self.latents is not None and (self.text or self.text_file):
            raise UsageError("latents and text: sampling starts from one of the two; leave one of them out")
        if self.latents is None and not (self.text or self.text_file):
            raise UsageError(
                "nothing to sample from: give --text 'a text', --text_file texts.txt or --latents latents.safetensors, "
                "or, for a model of pictures, --prompt 'a red heart' or --picture heart.png"
            )
        if self.latents is not None and self.to == "latents":
            raise UsageError("to latents with --latents: latents are sampled from text; give --text instead")
        for name in ("length", "temperature"):
            if getattr(self, name) is not None and self.to == "latents":
                raise UsageError(f"{name} with --to latents: only sampled texts have one; leave it out")

    def _refuse_beside_prompt(self) -> None:
        given = self._given("picture", "text", "text_file", "latents", "length", "temperature", "to")
        if given:
            raise UsageError(f"prompt and {', '.join(given)}: a prompt is drawn as a picture; leave the others out")
        if self.guidance is not None and not any(self.prompt):
            raise UsageError(
                f"prompt '' and guidance {self.guidance:g}: without a caption there is nothing for it to follow; leave "
                "guidance out, or give a caption"
            )

    def _refuse_beside_picture(self) -> None:
        given = self._given("text", "text_file", "latents", "to")
        if given:
            raise UsageError(f"picture and {', '.join(given)}: a picture is captioned; leave the others out")

    def _given(self, *names: str) -> list[str]:
        """Return those of the options that differ from their default."""
        # Compared with the default, because a temperature of 0 has been given as well.
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]
