"""Adapters: what peft itself would make of the same model, only they are trained, and peft loads what is exported."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train import frozen_weights
from accel_train.config import UsageError
from accel_train.domains.models import adapters, lora, quantised
from accel_train.domains.models.float8 import Float8Linear
from accel_train.domains.models.lora import LoraConfig, PartOfModel, apply_lora, target_layers
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.store.exports import peft_layout
from accel_train.store.pretrained_base import PretrainedBase
from tests.distributed.foreign_models import MODELS
from tests.speed.test_compile import batch as mmdit_batch

peft = pytest.importorskip("peft")
# peft reads a property that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TOKENS = torch.arange(12)[None] % 7


def test_layers_that_store_their_weight_transposed_are_no_warning() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Warnings are errors here.
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    apply_lora(model, LoraConfig(rank=2))
    found: Any = model
    assert found.peft_config[peft_layout.ADAPTER].fan_in_fan_out


def test_adapters_name_no_kernels_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject = peft.inject_adapter_in_model

    def importing(*given: Any) -> Any:
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")
        return inject(*given)

    monkeypatch.setattr(peft, "inject_adapter_in_model", importing)
    apply_lora(llama(), LoraConfig(rank=2))
    assert caplog.messages == []


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS["llama"]().requires_grad_(True).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def trained_a_little(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_the_scale_of_an_adapter_is_alpha_by_rank_and_1_without_one() -> None:
    model = llama()
    parts = [PartOfModel("model.layers.0", 8, None), PartOfModel("model.layers.1", 2, 6.0)]
    apply_lora(model, LoraConfig(rank=4, targets=("q_proj",)), parts=parts)
    scales = [layer.self_attn.q_proj.scaling[peft_layout.ADAPTER] for layer in model.model.layers]
    assert scales == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_it_is_what_peft_makes(variant: Any) -> None:
    ours, theirs = llama(), llama()
    torch.manual_seed(1)
    apply_lora(ours, LoraConfig(rank=4, alpha=6.0, variant=variant, targets=("q_proj", "v_proj")))
    torch.manual_seed(1)
    kind = {"use_dora": variant == "dora", "use_rslora": variant == "rslora", "target_modules": ["q_proj", "v_proj"]}
    whole = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6.0, **kind))
    assert torch.allclose(logits(ours), logits(llama()), atol=1e-6)
    trained_a_little(ours)
    trained_a_little(whole)
    assert torch.equal(logits(ours), logits(whole))
    assert not torch.allclose(logits(ours), logits(llama()), atol=1e-3)
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    (notice,) = lora.describe_lora(ours, LoraConfig(rank=4, variant=variant))
    assert notice.startswith(f"{variant} of rank 4 on 6 layers: ")


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_peft_loads_what_is_exported_and_merged_is_the_same(variant: Any, tmp_path: Path) -> None:
    model = llama()
    apply_lora(model, LoraConfig(rank=2, variant=variant))
    trained_a_little(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    adapter = peft_layout.by_key_of_peft(weights)
    assert len(adapter) == sum(1 for p in model.parameters() if p.requires_grad)
    save_file(adapter, tmp_path / f"{peft_layout.WEIGHTS_STEM}.safetensors")
    (tmp_path / peft_layout.CONFIG_FILE).write_text(json.dumps(lora.adapter_config(model, "some/base")))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(model))
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-5)


def test_the_head_of_a_model_may_have_any_name() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("biogpt", vocab_size=40, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config)
    assert model.get_output_embeddings() is model.output_projection
    assert "output_projection" not in lora.target_layers(model, ["all-linear"])
    assert lora.target_layers(model, ["output_projection"]) == {"output_projection"}
    lora.freeze_base(model, "fp8", "fp32", torch.device("cpu"))
    assert type(model.output_projection) is torch.nn.Linear


def test_targets_by_group() -> None:
    model = llama()
    everything = lora.resolve_targets(model, ["all-linear"])
    assert everything == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert lora.resolve_targets(model, ["attention"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert lora.resolve_targets(model, ["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    # The MLP of GPT-2 has a c_proj as well, so the whole path is needed.
    assert "transformer.h.0.attn.c_proj" in lora.resolve_targets(MODELS["gpt"](), ["attention"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 2.0}, r"lora\.alpha: 2: has no effect with lora\.rank: 0"),
        ({"targets": ("attention",)}, r"lora\.targets: attention: has no effect with lora\.rank: 0"),
        ({"rank": 2, "targets": ()}, "names no layer"),
    ],
)
def test_options_without_effect_are_refused(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LoraConfig(**options)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: Any = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_experts_without_an_adapter_are_counted() -> None:
    """transformers holds all experts of a layer in two parameters of three dimensions, which are no linear layers."""
    experts = sum(p.numel() for name, p in mixtral().named_parameters() if ".experts." in name)
    base = sum(p.numel() for p in mixtral().parameters())
    for targets, said in {None: True, ("q_proj", "all-linear"): True, ("attention",): False}.items():
        model = mixtral()
        config = LoraConfig(rank=2, targets=targets)
        apply_lora(model, config)
        notices = lora.describe_lora(model, config)[1:]
        expected = (
            f"{experts:,} of {base:,} weights are in 3-D parameters of experts (down_proj, gate_up_proj) and have no"
        )
        assert [notice.startswith(expected) for notice in notices] == [True] * said
    with pytest.raises(UsageError, match=r"'gate_up_proj' is not a linear layer of .*, but a 3-D parameter of experts"):
        apply_lora(mixtral(), LoraConfig(rank=2, targets=("gate_up_proj",)))
    assert len(lora.describe_lora(llama(), LoraConfig(rank=2))) == 1


def test_an_unknown_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'q_pro' is not a linear layer of .* \(did you mean 'q_proj'\?"):
        apply_lora(llama(), LoraConfig(rank=2, targets=("q_pro",)))
    model = llama()
    apply_lora(model, LoraConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert lora.describe_lora(model, LoraConfig()) == []


# ----------------------------------------------------------------------------------------------------- quantised bases
OF_BITSANDBYTES = ["int8", "nf4"]
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
BITS = ["fp8", *(pytest.param(bits, marks=needs_bitsandbytes) for bits in OF_BITSANDBYTES)]


@needs_bitsandbytes
@pytest.mark.parametrize("bits", OF_BITSANDBYTES)
def test_a_quantised_base_is_that_of_transformers(bits: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = llama()
    plain.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(
        load_in_8bit=bits == "int8",
        load_in_4bit=bits == "nf4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    loader: Any = AutoModelForCausalLM
    theirs = loader.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
    )
    ours = llama()
    lora.freeze_base(ours, bits, "fp32", lora.CPU)
    expected = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    assert {name: str(p.dtype) for name, p in ours.named_parameters()} == {n: str(p.dtype) for n, p in expected.items()}
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name
    assert not torch.equal(logits(ours), logits(llama()))


@pytest.mark.parametrize("bits", BITS)
def test_adapters_learn_on_a_quantised_base_that_stays(bits: Any) -> None:
    model = llama()
    torch.manual_seed(1)
    apply_lora(model, LoraConfig(rank=4, base_precision=bits))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in frozen.values()} == {torch.uint8 if bits == "nf4" else torch.int8, torch.float32}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=5e-2)
    losses: list[float] = []
    for step in range(12):
        model.train()
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        # An evaluation between two steps must not repack the weights.
        model.eval()
        assert logits(model).isfinite().all(), step
    assert losses[-1] < losses[0] - 0.1
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name].detach(), value) for name, value in frozen.items())
    (notice,) = lora.describe_lora(model, LoraConfig(rank=4, base_precision=bits))
    assert notice.endswith(f"on a base in {bits}")


@pytest.mark.parametrize("bits", BITS)
def test_the_mmdit_of_a_run_computes_in_floats_on_a_quantised_base(bits: Any) -> None:
    """Its latents enter a quantised layer: they are not to become the integers that hold its weights."""
    torch.manual_seed(0)
    config = MultimodalMMDiTConfig(MMDiTConfig(width=64, depth=2, heads=2), 50, 6, 16, 3)
    model = MultimodalMMDiT(config).eval()
    inputs = mmdit_batch()
    with torch.no_grad():
        before = model(**inputs)
        lora.freeze_base(model, bits, "fp32", lora.CPU)
        after = model(**inputs)
    far = 0.2 if bits == "nf4" else 0.05
    for one, other in zip(before, after, strict=True):
        assert (one - other).norm() < far * one.norm()


@pytest.mark.parametrize("bits", BITS)
def test_dequantised_layers_have_the_values_that_were_computed_with(bits: Any) -> None:
    model = llama()
    lora.freeze_base(model, bits, "fp32", lora.CPU)
    before = logits(model)
    quantised.dequantise(model)
    assert {type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__} == {"Linear"}
    # 8 bits round the activations as well.
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0.05 if bits == "int8" else 1e-5)


@pytest.mark.parametrize(
    ("bits", "share"),
    [
        ("fp8", 1 / 4),
        pytest.param("int8", 1 / 4, marks=needs_bitsandbytes),
        pytest.param("nf4", 1 / 8, marks=needs_bitsandbytes),
    ],
)
def test_the_size_is_known_before_anything_is_allocated(bits: Any, share: float) -> None:
    def linear_bytes(model: nn.Module) -> int:
        found = dict(model.named_parameters())
        return sum(p.numel() * p.element_size() for name, p in found.items() if "proj" in name and "lora" not in name)

    whole = linear_bytes(llama())
    with torch.device("meta"):
        model = MODELS["llama"]()
        apply_lora(model, LoraConfig(rank=4, base_precision=bits), device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert linear_bytes(model) == pytest.approx(share * whole)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_product_in_float8_is_that_of_the_decoded_weight(autocast: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 16)
    with torch.no_grad():
        plain.weight[3] = 0
    layer = Float8Linear.of(plain, lora.CPU)
    wrong = (layer.values() - plain.weight).abs()
    # e4m3 has 3 bits behind the first: half a unit in the last place, and below 2^-6 of the range steps of 2^-9.
    smallest = layer.scale * 2.0**-10
    assert bool((wrong <= plain.weight.abs() * 2.0**-4 + smallest).all())
    assert bool((layer.values()[3] == 0).all())
    decoded = nn.Linear(24, 16)
    decoded.weight = nn.Parameter(layer.values())
    decoded.bias = plain.bias
    found: list[torch.Tensor] = []
    for model in (layer, decoded):
        inputs = torch.linspace(-1, 1, 5 * 24).view(5, 24).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(inputs)
        outputs.float().square().sum().backward()
        assert inputs.grad is not None
        found += [outputs.detach(), inputs.grad]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_nothing_of_a_decoded_weight_is_kept_for_the_backward() -> None:
    layer = Float8Linear.of(nn.Linear(64, 64), lora.CPU)
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        layer(torch.ones(2, 64, requires_grad=True))
    assert sum(kept) == 64 * 64 + 64 * 4


def test_dora_on_float8_is_refused() -> None:
    with pytest.raises(UsageError, match=r"lora\.variant dora: .*base_precision fp8; use nf4"):
        LoraConfig(rank=2, variant="dora", base_precision="fp8")


@pytest.mark.parametrize("strategy", ["FSDP", "DEEPSPEED"])
def test_strategies_that_would_shard_a_quantised_base_are_refused(strategy: str) -> None:
    layout = SimpleNamespace(
        distributed_type=DistributedType[strategy],
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
    )
    frozen = [nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)]
    accelerator: Any = layout
    base = PretrainedBase("here", Path("here"), ("model.safetensors",))
    with pytest.raises(
        UsageError, match=r"quantised \(uint8\), and (fsdp2|zero3) would shard them.*DDP, ZeRO-1 or ZeRO-2"
    ):
        frozen_weights._refuse_quantised(accelerator, frozen, base, "reference")
    layout.distributed_type = DistributedType.MULTI_GPU
    layout.num_processes = 2
    frozen_weights._refuse_quantised(accelerator, frozen, base, "reference")
    for option, files in (("embed", base), ("auto", None)):
        with pytest.raises(UsageError, match=rf"checkpoints.base: {option}, but the frozen weights are quantised"):
            frozen_weights._refuse_quantised(accelerator, frozen, files, option)


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        UsageError, match=r"lora.base_precision nf4: needs bitsandbytes; .*accel-train\[lora,bitsandbytes"
    ):
        apply_lora(llama(), LoraConfig(rank=2, base_precision="nf4"))


@needs_bitsandbytes
def test_a_model_without_linear_layers_is_not_quantised() -> None:
    with pytest.raises(UsageError, match=r"has no nn.Linear except its head"):
        apply_lora(MODELS["gpt"](), LoraConfig(rank=2, base_precision="int8"))


PARTS = [PartOfModel("encoder", 2, 6.0, "text")]


def saved_adapters(folder: Path, config: LoraConfig, parts: list[PartOfModel]) -> Path:
    """A folder with the adapter_config.json that a checkpoint has."""
    model = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "encoder": nn.ModuleDict({"q_proj": nn.Linear(4, 4)})})
    apply_lora(model, config, parts=parts)
    folder.mkdir()
    (folder / peft_layout.CONFIG_FILE).write_text(json.dumps(lora.adapter_config(model, "some/base")))
    return folder


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("alpha", [None, 8.0])
def test_adapters_to_start_from_of_the_same_scale_are_taken(variant: Any, alpha: float | None, tmp_path: Path) -> None:
    config = LoraConfig(rank=4, alpha=alpha, variant=variant)
    folder = saved_adapters(tmp_path / "run", config, PARTS)
    adapters.refuse_other_training(folder, config, PARTS)
    adapters.refuse_other_training(folder, LoraConfig(rank=4, alpha=alpha or 4, variant=variant))
    adapters.refuse_other_training(None, LoraConfig(rank=2))
    adapters.refuse_other_training(tmp_path, LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            LoraConfig(rank=4),
            r"^lora\.alpha null \(the rank\): .*run, were trained with other values, .*; give --lora\.alpha 8$",
        ),
        (LoraConfig(rank=4, alpha=2.5), r"^--lora\.alpha 2\.5: .*; give --lora\.alpha 8$"),
        (LoraConfig(rank=4, alpha=8.0, variant="rslora"), r"^--lora\.variant rslora: .*; give --lora\.variant lora$"),
        (LoraConfig(rank=4, alpha=8.0, variant="dora"), r"^--lora\.variant dora: .*; give --lora\.variant lora$"),
        (LoraConfig(rank=8, alpha=8.0), r"^--lora\.rank 8: .*; give --lora\.rank 4$"),
        (LoraConfig(), r"^--lora\.rank 0, lora\.alpha null .*; give --lora\.rank 4 --lora\.alpha 8$"),
        # Its alpha is 8 now, but not with the rank to give.
        (LoraConfig(rank=8), r"^--lora\.rank 8, lora\.alpha null .*; give --lora\.rank 4 --lora\.alpha 8$"),
    ],
)
def test_adapters_to_start_from_of_another_scale_are_refused(given: LoraConfig, says: str, tmp_path: Path) -> None:
    folder = saved_adapters(tmp_path / "run", LoraConfig(rank=4, alpha=8.0), [])
    with pytest.raises(UsageError, match=says):
        adapters.refuse_other_training(folder, given)


def test_a_part_to_start_from_has_a_scale_of_its_own(tmp_path: Path) -> None:
    config = LoraConfig(rank=4, alpha=8.0)
    folder = saved_adapters(tmp_path / "run", config, PARTS)
    with pytest.raises(UsageError, match=r"^text\.alpha null \(the rank\): .*; give --text\.alpha 6$"):
        adapters.refuse_other_training(folder, config, [PARTS[0]._replace(alpha=None)])
    with pytest.raises(UsageError, match=r"^--text\.rank 3: .*; give --text\.rank 2$"):
        adapters.refuse_other_training(folder, config, [PARTS[0]._replace(rank=3)])
    none = PartOfModel("encoder", 0, None, "text")
    says = (
        r"^--text\.rank 0, text\.alpha null .*; give --text\.rank 2 --text\.alpha 6 --more 1; or run accel-train export"
    )
    with pytest.raises(UsageError, match=says):
        # The last part has none in the checkpoint either.
        adapters.refuse_other_training(folder, config, [none, none._replace(name="other")], beside_parts=" --more 1")
    without = saved_adapters(tmp_path / "without", config, [])
    adapters.refuse_other_training(without, config, [none])
    with pytest.raises(UsageError, match=r"; give --text\.rank 0, without other options of text$"):
        adapters.refuse_other_training(without, config, PARTS)


@pytest.mark.parametrize(("theirs", "ours"), [("rslora", "lora"), ("dora", "lora"), ("dora", "rslora")])
def test_another_variant_to_start_from_is_refused(theirs: Any, ours: Any, tmp_path: Path) -> None:
    folder = saved_adapters(tmp_path / "run", LoraConfig(rank=4, variant=theirs), [])
    with pytest.raises(UsageError, match=rf"^--lora\.variant {ours}: .*; give --lora\.variant {theirs}$"):
        adapters.refuse_other_training(folder, LoraConfig(rank=4, variant=ours))


def saved_on(folder: Path, layers: Sequence[str]) -> Path:
    """A folder as peft writes it, with adapters on some layers."""
    folder.mkdir()
    # The field may name other layers than there are tensors for.
    (folder / peft_layout.CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "target_modules": "all-linear"})
    )
    keys = [f"{peft_layout.PREFIX}{path}.lora_{matrix}.weight" for path in layers for matrix in "AB"]
    save_file({key: torch.ones(2, 2) for key in keys}, folder / f"{peft_layout.WEIGHTS_STEM}.safetensors")
    return folder


def layers(blocks: nn.Module, *targets: str, root: str = "") -> dict[str, lora.Layers]:
    def of(names: Sequence[str]) -> set[str]:
        return {f"{root}{path}" for path in target_layers(blocks, names)}

    return {"text": lora.Layers(targets or None, ("to_q",), of, (root,))}


def test_adapters_to_start_from_are_on_the_layers_of_the_targets(tmp_path: Path) -> None:
    blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(2, 2) for name in ("to_q", "to_k")}) for _ in range(2))
    refuse = partial(adapters.refuse_other_training, config=LoraConfig(rank=8))
    queries = saved_on(tmp_path / "queries", ["0.to_q", "1.to_q"])
    for targets in (("to_q",), ("0.to_q", "1.to_q"), ()):
        refuse(queries, layers=layers(blocks, *targets))
    refuse(None, layers=layers(blocks, "to_k"))
    refuse(tmp_path, layers=layers(blocks, "to_k"))
    says = r"^--text\.targets to_q to_k: the adapters of --init_from, .*queries, .*; give --text\.targets to_q$"
    with pytest.raises(UsageError, match=says):
        refuse(queries, layers=layers(blocks, "to_q", "to_k"))
    every = saved_on(tmp_path / "every", [f"{block}.{name}" for block in "01" for name in ("to_q", "to_k")])
    with pytest.raises(UsageError, match=r"^text\.targets null \(to_q\): .*; give --text\.targets all-linear$"):
        refuse(every, layers=layers(blocks))
    # One layer of its name, and of a part.
    one = saved_on(tmp_path / "one", ["part.1.to_q", "other.to_k"])
    with pytest.raises(UsageError, match=r"; give --text\.targets 1\.to_q$"):
        refuse(one, layers=layers(blocks, root="part."))
    # Layers that the model lacks are reported when the weights are loaded.
    refuse(saved_on(tmp_path / "foreign", ["0.to_v"]), layers=layers(blocks))


def test_all_differences_are_one_line_of_options(tmp_path: Path) -> None:
    blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(2, 2) for name in ("to_q", "to_k")}) for _ in range(2))
    every = saved_on(tmp_path / "every", [f"{block}.{name}" for block in "01" for name in ("to_q", "to_k")])
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["to_q"]}
    (every / peft_layout.CONFIG_FILE).write_text(json.dumps(settings))
    says = r"give --lora\.rank 8 --lora\.alpha 4 --lora\.variant rslora --text\.targets all-linear$"
    with pytest.raises(UsageError, match=says):
        adapters.refuse_other_training(every, LoraConfig(rank=4), layers=layers(blocks))


def test_parts_under_one_option_have_one_scale(tmp_path: Path) -> None:
    parts = [PartOfModel(name, 2, 6.0, "text") for name in ("encoder", "encoder_2")]
    alphas = {part.pattern: alpha for part, alpha in zip(parts, (3, 6), strict=True)}
    folder = saved_on(tmp_path / "two", ["to_q"])
    settings = {"peft_type": "LORA", "r": 8, "alpha_pattern": alphas, "rank_pattern": dict.fromkeys(alphas, 2)}
    (folder / peft_layout.CONFIG_FILE).write_text(json.dumps({**settings, "lora_alpha": 8, "target_modules": ["to_q"]}))
    with pytest.raises(UsageError, match=r"have another rank or alpha on encoder.* no option here can set"):
        adapters.refuse_other_training(folder, LoraConfig(rank=8), parts)
