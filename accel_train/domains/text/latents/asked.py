"""``accel-train sample`` for a model of text and latents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_train.config import expand_path
from accel_train.domains.models.pictures.captions import on_one_line
from accel_train.domains.text.latents.drawn import cut_notices, write_pictures
from accel_train.domains.text.latents.files import read_given
from accel_train.domains.text.options import TextLatentOptions
from accel_train.pipeline import listed, read_lines

if TYPE_CHECKING:
    from accel_train.domains.text.pipeline import TextLatentPipeline


def sample(pipeline: TextLatentPipeline, options: TextLatentOptions) -> list[str]:
    """Sample as the options ask, and return the lines to print."""
    placed = pipeline.with_models(encoder=options.encoder, vae=options.vae)
    sampler = placed.with_sampling(steps=options.steps, temperature=options.temperature, guidance=options.guidance)
    if options.prompt:
        prompts = captions(options.prompt)
        pictures = sampler.draw(prompts, seed=options.seed)
        for notice in cut_notices(pipeline.assets, prompts):
            print(notice, file=sys.stderr)
        return write_pictures(pictures, prompts, options.seed, options.output)
    if options.to == "latents":
        return _written_latents(sampler, options)
    return written(_texts(sampler, options), options.output)


def captions(given: str | Sequence[str]) -> list[str]:
    """Return the captions to draw, with whitespace as training reads it."""
    return [on_one_line(caption) for caption in listed(given)]


def _texts(sampler: TextLatentPipeline, options: TextLatentOptions) -> list[str]:
    """Sample a line of text for each picture, latent or text."""
    how: dict[str, Any] = {"seed": options.seed, "length": options.length}
    if options.picture:
        named = zip(options.picture, sampler.caption(options.picture, **how), strict=True)
        return [f"{printable(file)}: {on_one_line(text)}" for file, text in named]
    if options.latents is not None:
        said = sampler.texts_from_latents(read_given(options.latents), **how)
    else:
        said = sampler.texts_from_texts(_given_texts(options), **how)
    return [on_one_line(text) for text in said]


def _written_latents(sampler: TextLatentPipeline, options: TextLatentOptions) -> list[str]:
    from safetensors.torch import save

    # Latents cannot be printed as lines, so they go to a file even without a name for it.
    path = expand_path(options.output or "latents.safetensors")
    latents = sampler.latents_from_texts(_given_texts(options), seed=options.seed)
    path.write_bytes(save({"latents": latents}))
    return [f"{path}: latents {tuple(latents.shape)}, in the encoder's units"]


def _given_texts(options: TextLatentOptions) -> list[str]:
    return [*options.text, *read_lines(options.text_file)]


def written(lines: list[str], output: str | None) -> list[str]:
    """Return the lines, and write them to the file ``output`` if it is given."""
    if output is not None:
        expand_path(output).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return lines


def printable(path: str) -> str:
    """Return a path as printable text: a path may have bytes that are not UTF-8, which cannot be printed."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
