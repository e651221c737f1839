"""Half-downloaded and edited bases: refused by option, file and remedy before anything is trained on them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_train.config import UsageError
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.loading import BaseConfig, DiffusersBase, find_base
from tests.domains.images import tiny_pipelines as tiny

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CPU = torch.device("cpu")
Break = Callable[[Path], None]
SD1 = {
    "text_encoder": "encoder.layers.0.self_attn.q_proj.weight",
    "vae": "decoder.mid_block.attentions.0.to_q.weight",
    "unet": "conv_in.weight",
}
TENSORS = [
    *(("sd1", component, tensor) for component, tensor in SD1.items()),
    ("sdxl", "text_encoder_2", "text_projection.weight"),
    ("sd3", "text_encoder_3", "shared.weight"),
    ("flux2", "vae", "bn.running_mean"),
    ("z_image", "text_encoder", "model.norm.weight"),
]


def load(folder: Path) -> None:
    """Everything that a run reads of its base."""
    base = find_base(BaseConfig(source=str(folder)))
    assert isinstance(base, DiffusersBase)
    base.levels()
    base.components(CPU)
    base.denoiser("fp32")


def drop(folder: Path, tensor: str) -> None:
    """Take a tensor out of a component's file."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(tensor)]
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A base of each family, saved once."""
    root = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else tiny.save(name, folder)

    return base


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a base, to break."""
    return lambda name: shutil.copytree(saved(name), tmp_path / "base")


@pytest.mark.fault(
    "R7",
    injected="a tensor, config, scheduler or vocabulary missing from a text-to-image base",
    outcome="exit 2 with the component and file",
)
@pytest.mark.parametrize(("name", "component", "tensor"), TENSORS)
def test_a_missing_tensor_is_named(name: str, component: str, tensor: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    drop(folder / component, tensor)
    message = rf"base.source .*: its {component} in .*/{component}: its files lack tensors \(\d\), .*{tensor}.*download"
    with pytest.raises(UsageError, match=message):
        load(folder)


@pytest.mark.parametrize("name", tiny.PIPELINES)
def test_a_whole_base_of_any_family_is_not_refused(name: str, saved: Callable[[str], Path]) -> None:
    load(saved(name))


def test_the_output_layer_of_a_text_encoder_may_be_missing(copied: Callable[[str], Path]) -> None:
    folder = copied("z_image")
    found: list[Any] = []
    hashes: list[str] = []
    for _ in range(3):
        base = find_base(BaseConfig(source=str(folder)))
        assert isinstance(base, DiffusersBase)
        pipeline = base.components(CPU)
        found.append(encoding.encode_texts(pipeline, base, ["a red flag"])["prompt"])
        hashes.append(encoding.identity_of_texts(pipeline, base).weights)
        if len(found) == 1:
            drop(folder / "text_encoder", "lm_head.weight")
    assert torch.equal(found[0], found[1])
    # And every process and start finds the same entries of the cache.
    assert hashes[1] == hashes[2]


def gone(path: str) -> Break:
    def change(base: Path) -> None:
        target = base / path
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    return change


def emptied(path: str) -> Break:
    def change(base: Path) -> None:
        gone(path)(base)
        (base / path).mkdir()

    return change


def written(path: str, text: str) -> Break:
    def change(base: Path) -> None:
        (base / path).write_text(text, "utf-8")

    return change


def edited(path: str, **values: Any) -> Break:
    """Change keys of a JSON file. None takes a key out."""

    def change(base: Path) -> None:
        content = json.loads((base / path).read_text("utf-8")) | values
        kept = {key: value for key, value in content.items() if key not in values or value is not None}
        (base / path).write_text(json.dumps(kept), "utf-8")

    return change


BROKEN: dict[str, tuple[Break, str]] = {
    "no vocabulary": (gone("tokenizer/tokenizer.json"), r"tokenizer .* knows 0 tokens of .* a tokenizer\.json"),
    "tokenizer without a length": (
        gone("tokenizer/tokenizer_config.json"),
        r"model_max_length of 1e\+30 tokens; at most 16 are .*tokenizer_config\.json",
    ),
    "empty tokenizer folder": (emptied("tokenizer"), r"which has no file, knows 0 tokens .* a tokenizer\.json"),
    "no tokenizer folder": (gone("tokenizer"), r"its tokenizer cannot be loaded .*tokenizer/tokenizer\.json"),
    "tokenizer of nothing": (written("tokenizer/tokenizer.json", "{}"), r"its tokenizer cannot .*tokenizer\.json"),
    "empty config": (written("unet/config.json", ""), r"its unet needs .*unet/config\.json, and it is not JSON"),
    "config without values": (written("vae/config.json", "{}"), r"vae/config\.json, and it is not a JSON object with"),
    "no config": (gone("text_encoder/config.json"), r"text_encoder/config\.json, and it is not there"),
    "no scheduler": (gone("scheduler"), r"its scheduler needs .*scheduler_config\.json, and it is not there"),
    "absent key": (edited("unet/config.json", block_out_channels=None), r"its unet cannot .*unet/config\.json"),
    "null": (written("unet/config.json", '{"block_out_channels": null}'), r"its unet cannot .*unet/config\.json"),
    "unknown activation": (edited("text_encoder/config.json", hidden_act="no"), r"KeyError.*text_encoder/config\.json"),
    "cut weights": (written("text_encoder/model.safetensors", "cut"), r"its text_encoder cannot be loaded"),
    "unknown class": (
        edited("model_index.json", unet=["diffusers", "No"]),
        r"model_index\.json names diffusers\.No as",
    ),
    "tokenizer longer than its encoder": (
        edited("tokenizer/tokenizer_config.json", model_max_length=17),
        r"model_max_length of 17 tokens; at most 16 are",
    ),
}


@pytest.mark.fault(
    "R7",
    injected="a tensor, config, scheduler or vocabulary missing from a text-to-image base",
    outcome="exit 2 with the component and file",
)
@pytest.mark.parametrize("case", BROKEN)
def test_an_unusable_file_is_named(case: str, copied: Callable[[str], Path]) -> None:
    folder = copied("sd1")
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(UsageError, match=rf"base\.source {re.escape(repr(str(folder)))}: .*{message}") as caught:
        load(folder)
    assert "--base.source" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tokenizer"), [("flux", "tokenizer_2"), ("sdxl", "tokenizer_2"), ("sana", "tokenizer")]
)
def test_a_tokenizer_of_any_kind_without_its_vocabulary_is_refused(
    name: str, tokenizer: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    (folder / tokenizer / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=rf"its {tokenizer} in .* knows [01] tokens"):
        load(folder)


def test_tokens_beyond_the_embeddings_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("sd1")
    path = folder / "tokenizer" / "tokenizer.json"
    content = path.read_text("utf-8").replace('"r": 81', '"r": 9999')
    path.write_text(content, "utf-8")
    with pytest.raises(UsageError, match="has the token 9999, and the text encoder has 514 embeddings"):
        load(folder)


def test_a_variant_without_weights_is_refused(copied: Callable[[str], Path]) -> None:
    folder = str(copied("sd1"))
    # Before anything is encoded.
    with pytest.raises(UsageError, match=r"base\.variant 'fp16': .*unet has no such safetensors"):
        find_base(BaseConfig(source=folder, variant="fp16"))


def test_weights_of_a_variant_may_lie_in_several_files(copied: Callable[[str], Path]) -> None:
    """As the T5 of Stable Diffusion 3 does."""
    folder = copied("sd1")
    for component in ("unet", "vae", "text_encoder"):
        for file in (folder / component).glob("*.safetensors"):
            file.rename(file.with_suffix(".fp16.safetensors"))
    encoder = folder / "text_encoder"
    tensors = load_file(encoder / "model.fp16.safetensors")
    (encoder / "model.fp16.safetensors").unlink()
    shard = "model.fp16-00001-of-00001.safetensors"
    save_file(tensors, encoder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (encoder / "model.safetensors.index.fp16.json").write_text(json.dumps(index), "utf-8")
    base = find_base(BaseConfig(source=str(folder), variant="fp16"))
    assert isinstance(base, DiffusersBase)
    found = base.components(CPU).text_encoder.state_dict()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert f"text_encoder/{shard}" in base.files().definition
    assert base.files().files == ("diffusion_pytorch_model.fp16.safetensors",)
    (folder / "unet" / "diffusion_pytorch_model_old.fp16.safetensors").write_bytes(b"")
    for name in ("diffusion_pytorch_model.fp16-00001-of-00002", "diffusion_pytorch_model-00002-of-00002.fp16"):
        (folder / "unet" / f"{name}.safetensors").write_bytes(b"")
    assert len(base.files().files) == 3
