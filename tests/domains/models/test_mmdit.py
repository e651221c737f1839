"""The MMDiT against diffusers' block, and what training, sharding and saving rely on."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.mmdit import (
    SIZES,
    MMDiT,
    MMDiTBlock,
    MMDiTConfig,
    ModelConfig,
    MultimodalMMDiT,
    MultimodalMMDiTConfig,
    Stream,
)

SMALL = MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=2, heads=4), 50, 6, 8, 3)


def build(config: MultimodalMMDiTConfig = SMALL, noise: float = 0.1) -> MultimodalMMDiT:
    """A model off its starting point, where gates are zero and blocks do nothing."""
    torch.manual_seed(0)
    model = MultimodalMMDiT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def batch(size: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (size, 1), generator=generator)
    return {
        "tokens": torch.randint(0, 50, (size, 8), generator=generator),
        "latents": torch.randn(size, 3, 6, generator=generator),
        "text_time": torch.rand(size, generator=generator),
        "latent_time": torch.rand(size, generator=generator),
        "text_mask": torch.arange(8) < lengths,
    }


def copy_linear(target: nn.Linear, *sources: nn.Linear) -> None:
    with torch.no_grad():
        target.weight.copy_(torch.cat([source.weight for source in sources]))
        target.bias.copy_(torch.cat([source.bias for source in sources]))


def copy_stream(stream: Stream, attention: dict[str, Any], modulation: nn.Linear, ffn: Any) -> None:
    """`attention`: diffusers' layers of one stream by the names q, k, v, out, norm_q, norm_k."""
    if stream.context_only:  # diffusers' AdaLayerNormContinuous gives scale, then shift
        copy_linear(stream.modulation.linear, modulation)
        width = modulation.out_features // 2
        with torch.no_grad():
            stream.modulation.linear.weight.copy_(modulation.weight.roll(width, 0))
            stream.modulation.linear.bias.copy_(modulation.bias.roll(width, 0))
        copy_linear(stream.qkv, attention["k"], attention["v"])
    else:
        copy_linear(stream.modulation.linear, modulation)
        copy_linear(stream.qkv, attention["q"], attention["k"], attention["v"])
        assert stream.out is not None
        assert stream.ffn is not None
        copy_linear(stream.out, attention["out"])
        copy_linear(stream.ffn.expand, ffn.net[0].proj)
        copy_linear(stream.ffn.project, ffn.net[2])
    for norm, source in ((stream.q_norm, attention["norm_q"]), (stream.k_norm, attention["norm_k"])):
        if norm is not None:
            norm.load_state_dict(source.state_dict())


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("context_only", [False, True])
def test_block_equals_sd3(qk_norm: bool, context_only: bool) -> None:
    from diffusers.models.attention import JointTransformerBlock

    torch.manual_seed(0)
    width, heads = 64, 4
    theirs = JointTransformerBlock(width, heads, width // heads, context_only, "rms_norm" if qk_norm else None)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    config = MMDiTConfig(width, 1, heads, qk_norm=qk_norm, bias=True, tanh_gelu=True)
    ours = MMDiTBlock(config, context_only=(1,) if context_only else ())
    a = theirs.attn
    image, text = ours.streams
    assert isinstance(image, Stream)
    assert isinstance(text, Stream)
    layers = {"q": a.to_q, "k": a.to_k, "v": a.to_v, "out": a.to_out[0], "norm_q": a.norm_q, "norm_k": a.norm_k}
    copy_stream(image, layers, theirs.norm1.linear, theirs.ff)
    layers = {"q": a.add_q_proj, "k": a.add_k_proj, "v": a.add_v_proj, "out": getattr(a, "to_add_out", None)}
    layers |= {"norm_q": a.norm_added_q, "norm_k": a.norm_added_k}
    copy_stream(text, layers, theirs.norm1_context.linear, theirs.ff_context)

    x, y = torch.randn(3, 9, width, requires_grad=True), torch.randn(3, 5, width, requires_grad=True)
    c = torch.randn(3, width, requires_grad=True)
    expected_text, expected_image = theirs(x, y, c)
    result_image, result_text = ours((x, y), nn.functional.silu(c), None)
    torch.testing.assert_close(result_image, expected_image, rtol=1e-4, atol=1e-4)
    if context_only:
        assert result_text is y
    else:
        torch.testing.assert_close(result_text, expected_text, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(result_image)
    gradients = torch.autograd.grad((result_image * weights).sum(), (x, y, c))
    references = torch.autograd.grad((expected_image * weights).sum(), (x, y, c))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-3)


def test_shapes_and_every_parameter_takes_part_in_every_term() -> None:
    model = build()
    output = model(**batch())
    assert output.text_logits.shape == (4, 8, 50)
    assert output.latents.shape == (4, 3, 6)
    (output.text_logits.square().sum() + 0 * output.latents.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_blocks_start_as_the_identity() -> None:
    torch.manual_seed(0)
    model = MMDiT(SMALL.transformer)
    text, latent = torch.randn(2, 5, 48), torch.randn(2, 3, 48)
    for result, x, norm in zip(
        model((text, latent), torch.randn(2, 48), None), (text, latent), model.norms, strict=True
    ):
        torch.testing.assert_close(result, norm(x), rtol=0, atol=0)


def test_first_predictions_are_near_uniform_and_near_zero() -> None:
    torch.manual_seed(0)
    output = MultimodalMMDiT(SMALL)(**batch())
    assert output.text_logits.std() < 0.3
    assert output.latents.abs().max() < 0.3


def test_padding_has_no_influence() -> None:
    model, inputs = build(), batch()
    mask = inputs["text_mask"]
    assert not mask.all()
    other = inputs | {"tokens": torch.where(mask, inputs["tokens"], 49 - inputs["tokens"])}
    first, second = model(**inputs), model(**other)
    assert not torch.equal(first.text_logits, second.text_logits)  # at the padding itself
    torch.testing.assert_close(first.text_logits[mask], second.text_logits[mask], rtol=0, atol=0)
    torch.testing.assert_close(first.latents, second.latents, rtol=0, atol=0)


def test_no_mask_equals_a_mask_of_ones() -> None:
    model, inputs = build(), batch()
    ones = model(**inputs | {"text_mask": torch.ones(4, 8, dtype=torch.bool)})
    none = model(**inputs | {"text_mask": None})
    torch.testing.assert_close(ones.text_logits, none.text_logits)


def test_every_input_reaches_both_heads() -> None:
    model, inputs = build(), batch()
    first = model(**inputs)
    for name in ("tokens", "latents", "text_time", "latent_time"):
        second = model(**inputs | {name: inputs[name].flip(0)})
        assert not torch.allclose(first.text_logits[0, 0], second.text_logits[0, 0], atol=1e-4), name
        assert not torch.allclose(first.latents[0], second.latents[0], atol=1e-4), name


def test_positions_distinguish_tokens_and_latents() -> None:
    model = build()
    inputs = batch() | {"tokens": torch.ones(4, 8, dtype=torch.int64), "latents": torch.ones(4, 3, 6)}
    output = model(**inputs)
    assert not torch.allclose(output.text_logits[:, 0], output.text_logits[:, 1], atol=1e-4)
    assert not torch.allclose(output.latents[:, 0], output.latents[:, 1], atol=1e-4)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, inputs = build(), batch(7)
    whole = model(**inputs)
    alone = model(**{name: value[3:4] for name, value in inputs.items()})
    torch.testing.assert_close(alone.text_logits, whole.text_logits[3:4], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.latents, whole.latents[3:4], rtol=1e-4, atol=1e-5)


def test_training_draws_nothing() -> None:
    """Dropout would draw from the process's generator, and the result would depend on the machine."""
    model, inputs = build().train(), batch()
    state = torch.get_rng_state()
    first, second = model(**inputs), model(**inputs)
    assert torch.equal(first.text_logits, second.text_logits)
    assert torch.equal(state, torch.get_rng_state())


def test_initialisation_is_a_function_of_the_seed() -> None:
    states: list[dict[str, Tensor]] = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(MultimodalMMDiT(SMALL).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["text_head.weight"], states[2]["text_head.weight"])


@pytest.mark.parametrize("cast_weights", [False, True])
def test_bf16(cast_weights: bool) -> None:
    """fp32 times and latents meet bf16 weights (DeepSpeed) or autocast; the conditioning stays fp32."""
    model, inputs = build(noise=0.02), batch()
    expected = model(**inputs)
    if cast_weights:
        model.bfloat16()
    seen: list[torch.dtype] = []
    model.conditioning.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast_weights):
        output = model(**inputs)
    assert seen == [torch.float32]
    for result, reference in zip(output, expected, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.float() - reference).norm() < 0.03 * reference.norm()
    (output.text_logits.float().sum() + output.latents.float().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 3},
        {"heads": 2},
        {"conditioning_width": 16},
        {"ffn_ratio": 2},
        {"qk_norm": False},
        {"bias": True},
        {"tanh_gelu": True},
    ],
)
def test_every_option_of_the_architecture_is_used(change: dict[str, Any]) -> None:
    base = build()
    changed = build(replace(SMALL, transformer=replace(SMALL.transformer, **change)))
    own = changed.state_dict()
    shared = {name: value for name, value in base.state_dict().items() if name in own}
    same = {name: value for name, value in shared.items() if own[name].shape == value.shape}
    changed.load_state_dict(same, strict=False)
    assert not torch.equal(base(**batch()).text_logits, changed(**batch()).text_logits)


def test_sizes() -> None:
    table = {"tiny": (512, 8, 8), "small": (768, 12, 12), "base": (1024, 24, 16), "1b": (2048, 24, 32)}
    table["sd3_medium"] = (1536, 24, 24)
    assert {name: tuple(size.values()) for name, size in SIZES.items() if name != "demo"} == table
    for name in SIZES:
        config = ModelConfig(size=name).transformer()  # type: ignore[arg-type]
        assert SIZES[name] == {key: getattr(config, key) for key in ("width", "depth", "heads")}
    replaced = ModelConfig(size="tiny", width=256, depth=2, heads=4, conditioning_width=64, ffn_ratio=3)
    assert replaced.transformer() == MMDiTConfig(256, 2, 4, 64, ffn_ratio=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 100, "heads": 8}, ("width 100", "16", "96")),
        ({"width": 45, "heads": 5}, ("width 45", "10", "40")),
        ({"width": 0}, ("width 0", "at least 1")),
        ({"depth": 0}, ("depth 0", "at least 1")),
        ({"conditioning_width": -1}, ("conditioning_width -1", "at least 1")),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        MMDiTConfig(**change)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("streams", [(0, 1), (2,), (-1,)])
def test_impossible_context_streams_are_refused(streams: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="context_only"):
        MMDiT(SMALL.transformer, context_only=streams)


@pytest.mark.parametrize(("name", "shape"), [("tokens", (1, 9)), ("latents", (1, 4, 6))])
def test_more_positions_than_built_for_are_refused(name: str, shape: tuple[int, ...]) -> None:
    inputs = batch(1) | {name: torch.zeros(shape, dtype=torch.int64 if name == "tokens" else torch.float32)}
    with pytest.raises(UsageError, match=f"length {shape[1]}.* at most {shape[1] - 1}"):
        build()(**inputs)


def test_context_only_stream_reaches_the_output_and_has_no_idle_parameters() -> None:
    torch.manual_seed(0)
    model = MMDiT(SMALL.transformer, context_only=(0,))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    text, latent = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 3, 48)
    model((text, latent), torch.randn(2, 48), None)[1].sum().backward()
    assert text.grad is not None
    assert text.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.parameters())


def test_blocks_compile_without_graph_breaks() -> None:
    block = build().transformer.blocks[0]
    tokens, conditioning = (torch.randn(2, 8, 48), torch.randn(2, 3, 48)), torch.randn(2, 48)
    mask = torch.ones(2, 11, dtype=torch.bool)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for result, expected in zip(compiled(tokens, conditioning, mask), block(tokens, conditioning, mask), strict=True):
        torch.testing.assert_close(result, expected)


def test_saved_model_loads_where_training_is_never_imported(tmp_path: Path) -> None:
    model = build(replace(SMALL, transformer=replace(SMALL.transformer, conditioning_width=24)))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["transformer"]["conditioning_width"] == 24
    program = (
        "import sys, torch\n"
        "from accel_train.domains.models.mmdit import MultimodalMMDiT\n"
        f"model = MultimodalMMDiT.from_pretrained({str(tmp_path)!r})\n"
        "unwanted = {'accelerate', 'transformers', 'accel_train.training', 'accel_train.runtime'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)\n"
        f"torch.save(model.state_dict(), {str(tmp_path / 'loaded.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    assert MultimodalMMDiT.from_pretrained(tmp_path).config == model.config


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["text_head.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"text_head\.bias"):
        MultimodalMMDiT.from_pretrained(tmp_path)
    loaded = MultimodalMMDiT.from_pretrained(tmp_path, strict=False)
    assert torch.equal(loaded.text_head.weight, weights["text_head.weight"])
    assert not loaded.training


def test_state_is_plain() -> None:
    model = build()
    parameters = dict(model.named_parameters())
    assert model.state_dict().keys() == parameters.keys()  # no buffers
    assert len({parameter.data_ptr() for parameter in parameters.values()}) == len(parameters)  # none shared
    names = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= names
