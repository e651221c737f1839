"""Captioned pictures of a run: bundled emoji, generated shapes, or your own, as rows of latents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import Fraction, PositiveInt, UsageError, refuse_without_effect
from accel_train.data.artifacts import cache_directory, cached_folder, of_rank_0
from accel_train.domains.images.demo import emoji, shapes
from accel_train.domains.images.rows.own_pictures import DataOptions, read_own
from accel_train.domains.images.rows.picture_rows import Captioned, CaptionedPictures, Parts, write_rows
from accel_train.domains.models.pictures.patching import Patching
from accel_train.domains.models.vae import IDENTITY_FILE, PictureVae, load_vae
from accel_train.store import strict_json
from accel_train.store.run_file import experiment_options

FORMAT = "pictures-2"
"""Part of the key of cached rows. Raise the number when the same options give other rows."""
OWN_ROWS = "rows-2"
"""Part of the folder name of cached rows of your own pictures. Raise the number when their fields or order change. The
identity of their latents does not contain it."""
SHAPES_SEED = 0
HELDOUT_SHAPES = 1024
EMOJI = ("emoji", "demo")
SHAPES = "shapes"
BUNDLED = (*EMOJI, SHAPES)
FREE_TO_CHANGE = ("pictures.max_left_out", "pictures.vae_batch_size")
"""Options that a resume may change: they change no sample."""
DECIDE_SHAPES = ("pictures.latents", "pictures.vae", "pictures.size", "pictures.patch")
"""Options that decide the shapes of the weights."""
OF_TEXTS = ("latents", "encoder", "latent_dim", "normalise", "read", "shuffle_blocks")
"""Options of the `data` group for latents of texts and for shards of texts."""
OF_SOURCES = ("heldout_path", "split", "text_column")
"""Options of the `data` group that only pictures of your own have."""


@dataclass(frozen=True)
class PictureConfig:
    """Pictures in place of latents of text."""

    latents: Literal["none", "pixels", "vae"] = "none"
    """none: data.path holds texts. pixels: it holds captioned pictures, and their patches are the latents: 'emoji'
    (bundled), 'shapes' (generated), or a folder, parquet files, a saved dataset or a Hub id of your own, cut to squares
    at the centre. vae: the same, encoded once by the autoencoder pictures.vae; for pictures of 256 pixels and more."""
    vae: str | None = None
    """Autoencoder of diffusers (AutoencoderKL, AutoencoderDC, AutoencoderTiny): Hub id or folder of its own, or of a
    pipeline that has one, such as stabilityai/stable-diffusion-xl-base-1.0. It stays frozen, in fp32."""
    vae_revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    vae_batch_size: PositiveInt = 8
    """Pictures that it encodes or decodes at once. Affects speed and memory only."""
    size: PositiveInt = 32
    """Pixels of a side, a multiple of patch, and with a vae of patch times its reduction. Bundled emoji have 32 or
    64."""
    patch: PositiveInt = 4
    """Pixels of a patch's side, with a vae its latents: 2 is usual there. A picture has (size / patch)^2 tokens of 3
    patch^2 values: half the patch is four times the compute."""
    samples: PositiveInt = 8192
    """data.path shapes: training pictures to draw."""
    leave_out: tuple[str, ...] = ()
    """data.path emoji: groups to leave out, such as flags, and 'skin tones' for all but the yellow ones of people."""
    image_column: str | None = None
    """Your own pictures: their column in a table. None: the only one. data.text_column is that of the captions."""
    max_left_out: Fraction = 0.1
    """Your own pictures: largest share of pictures and captions left out for any reason. More is an error."""

    def __post_init__(self) -> None:
        if self.latents == "none":
            names = ("size", "patch", "samples", "leave_out", "image_column", "max_left_out")
            self._refuse(names, "pictures.latents: none")
        if self.latents != "vae":
            names = ("vae", "vae_revision", "vae_batch_size")
            self._refuse(names, f"pictures.latents: {self.latents}", "give --pictures.latents vae")
        elif self.vae is None:
            raise UsageError(
                "--pictures.vae: --pictures.latents vae needs an autoencoder, and none is given; give a Hub id or a "
                "folder, such as --pictures.vae stabilityai/stable-diffusion-xl-base-1.0"
            )
        if self.size % self.patch:
            nearest = max(1, round(self.size / self.patch)) * self.patch
            raise UsageError(
                f"--pictures.size {self.size} with --pictures.patch {self.patch}: a multiple of the patch is required. "
                f"Set size {nearest}, or another patch."
            )
        emoji.check_groups("--pictures.leave_out", self.leave_out)

    def refuse_unread(self, path: str) -> None:
        """Raise ``WithoutEffectError`` for options not read by this source of pictures."""
        if path not in EMOJI:
            self._refuse(("leave_out",), f"data.path: {path}")
        if path != SHAPES:
            self._refuse(("samples",), f"data.path: {path}")
        if path in BUNDLED:
            self._refuse(("image_column", "max_left_out"), f"data.path: {path}")

    def _refuse(self, names: Sequence[str], cause: str, instead: str | None = None) -> None:
        refuse_without_effect(self, "pictures", names, f"with {cause}", instead)


@dataclass(frozen=True)
class _Source:
    """Source of the rows in one folder of the cache."""

    facts: tuple[Any, ...]
    """Everything that the rows depend on."""
    parts: Callable[[], Parts]
    total: int = 0
    """Number of pictures, for the progress display."""
    notices: tuple[str, ...] = ()
    rows: str = ""
    """Version of the rows in addition to ``FORMAT``, or empty."""
    split_keys: Mapping[str, int] = field(default_factory=dict[str, int])
    """`split_key` of captions, as far as they are known."""


def prepare_pictures(
    config: PictureConfig,
    data: DataOptions,
    *,
    device: str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    weights: WeightsAssets | None = None,
) -> CaptionedPictures | None:
    """Write the rows of `data.path` into the cache unless they are there. Every rank calls it (up to four barriers).

    With an autoencoder, rank 0 encodes the pictures on `device`, and every rank keeps the autoencoder there to decode
    samples. Held out are about `heldout_fraction` of the emoji's names, the shapes with pairs of colour and form absent
    from training pictures, and of your own pictures those of `heldout_path`, or a share by their captions. `weights`
    are the assets beside the weights of this start, which name the commit of the autoencoder. Returns None if the data
    are texts. Raises ``UsageError``.
    """
    if config.latents == "none":
        return None
    path = data.path
    refuse_unread(config, data)
    patching = _patching(
        config, _vae(config, _revision(config, weights and weights.folder), rank, world_size, barrier), device
    )
    cache = cache_directory(data.cache_dir)
    if path in BUNDLED:
        source = _bundled(config, data)
    else:
        own = read_own(config, data, cache, rank=rank, world_size=world_size, barrier=barrier)
        source = _Source(own.facts, partial(own.parts, config.size), own.total, own.notices, OWN_ROWS, own.split_keys)
    key = hashlib.sha256(f"{FORMAT} {config.size} {patching.identity} {source.facts}".encode()).hexdigest()

    def write(directory: Path) -> None:
        write_rows(directory, source.parts(), patching, source.total)
        if patching.vae is not None:
            # Another machine's autoencoder rounds differently, but the data count as the same.
            (directory / IDENTITY_FILE).write_text(key)

    name = hashlib.sha256(f"{source.rows} {key}".encode()).hexdigest() if source.rows else key
    folder = cached_folder(cache / "pictures" / name, write, rank=rank, barrier=barrier)
    side = config.size // patching.side
    about = f"pictures of {config.size} x {config.size} pixels in {side} x {side} patches ({path})"
    notices = (*source.notices, about, *_about_vae(patching.vae))
    return CaptionedPictures(folder, (side, side), patching, path == SHAPES, notices, source.split_keys)


def _bundled(config: PictureConfig, data: DataOptions) -> _Source:
    if data.path == SHAPES:
        return _Source((SHAPES, SHAPES_SEED, config.samples, HELDOUT_SHAPES), partial(_shapes, config))
    # Everything that the rows depend on, so that each choice has a folder of its own in the cache.
    facts = ("emoji", emoji.file_hash(), data.heldout_fraction, *config.leave_out)
    return _Source(facts, partial(_emoji, config, data.heldout_fraction))


def refuse_unread(config: PictureConfig, data: DataOptions) -> None:
    """Raise ``WithoutEffectError`` for options of pictures and of `data` that are not read for these pictures."""
    if config.latents == "none":
        return
    config.refuse_unread(data.path)
    because = f"with pictures.latents: {config.latents}, where the pictures themselves are the latents"
    refuse_without_effect(data, "data", OF_TEXTS, because)
    if data.path in BUNDLED:
        because = f"with data.path: {data.path}, whose pictures and captions are bundled"
        refuse_without_effect(data, "data", OF_SOURCES, because)
    if data.path == SHAPES:
        because = f"with data.path: {SHAPES}, which holds out the pairs of colour and form that training lacks"
        refuse_without_effect(data, "data", ["heldout_fraction"], because)


def _revision(config: PictureConfig, earlier: Path | None) -> str | None:
    """Return the commit of the autoencoder that the run began with, if its options are those of the start."""
    if earlier is not None:
        with suppress(OSError, ValueError):  # a damaged checkpoint is passed over by the resume too
            begun = experiment_options(earlier.parent)
            if (begun.get("pictures.vae"), begun.get("pictures.vae_revision")) == (config.vae, config.vae_revision):
                return (strict_json.read_object(earlier / "assets.json").get("vae") or {}).get("revision")
    return config.vae_revision


def _vae(
    config: PictureConfig, revision: str | None, rank: int, world_size: int, barrier: Callable[[], None]
) -> PictureVae | None:
    """Load the autoencoder of the options, if there is one, at the commit that rank 0 finds. Collective."""
    if config.vae is None:
        return None
    load = partial(load_vae, config.vae, option="--pictures.vae")
    own = load(revision=revision) if rank == 0 else None
    # A branch may move on between two requests.
    commit = of_rank_0(revision if own is None else own.reference.revision, world_size, barrier)
    return load(revision=commit) if own is None else own


def _patching(config: PictureConfig, vae: PictureVae | None, device: str) -> Patching:
    """Return the patching of the options. Raises ``UsageError`` for a size that is not a multiple of a token's side."""
    if vae is None:
        return Patching(config.patch)
    patching = Patching(config.patch, vae.to(device), config.vae_batch_size)
    if config.size % patching.side:
        nearest = max(1, round(config.size / patching.side)) * patching.side
        raise UsageError(
            f"--pictures.size {config.size} with --pictures.patch {config.patch}: a multiple of {patching.side} is "
            f"required, because the autoencoder reduces by {vae.reference.reduction}. Set size {nearest}, or another "
            "patch"
        )
    return patching


def _about_vae(vae: PictureVae | None) -> tuple[str, ...]:
    if vae is None:
        return ()
    reference = vae.reference
    return (
        f"latents of {type(vae.module).__name__} ({reference.source}): {reference.channels} channels, 1 for "
        f"{reference.reduction} x {reference.reduction} pixels",
    )


def _shapes(config: PictureConfig) -> Parts:
    captions, pictures = shapes.pictures(SHAPES_SEED, config.samples, config.size)
    yield "train", Captioned([(caption,) for caption in captions], pictures)
    captions, pictures = shapes.pictures(SHAPES_SEED, HELDOUT_SHAPES, config.size, heldout=True)
    # One picture per caption: held-out texts are sorted, so the first ones would share a few captions.
    first = [index for index, caption in enumerate(captions) if caption not in captions[:index]]
    yield "heldout", Captioned([(captions[index],) for index in first], pictures[first])


def _emoji(config: PictureConfig, heldout_fraction: float) -> Parts:
    listed = emoji.list_emoji()
    pictures = emoji.load_pictures(config.size)
    used = [index for index, one in enumerate(listed) if not one.is_in(config.leave_out)]
    for part in ("train", "heldout"):
        rows = [index for index in used if listed[index].heldout(heldout_fraction) == (part == "heldout")]
        yield part, Captioned([(listed[index].caption,) for index in rows], pictures[rows])
