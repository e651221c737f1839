import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, BertTokenizer, XLNetConfig, XLNetModel

from accel_train.config import UsageError
from accel_train.domains.text.encoders import TransformerEncoder, load_encoder, pool
from accel_train.domains.text.latents.sentence_modules import refuse_other_modules
from tests import tiny_encoders

TEXTS = ["to be or not to be", "my lord", "good night sweet prince that is the question", "king"]


def states(model: Any, folder: Path, text: str) -> torch.Tensor:
    """(S, H) of one text alone: no padding to be wrong about."""
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=inputs["input_ids"]).last_hidden_state
    return hidden[0]


def test_bert_pooling_truncation_and_normalising_equal_the_model_run_text_by_text(tmp_path: Path) -> None:
    model = tiny_encoders.bert(tmp_path)
    alone = [states(model, tmp_path, text) for text in TEXTS]
    expected = {
        "mean": torch.stack([hidden.mean(0) for hidden in alone]),
        "cls": torch.stack([hidden[0] for hidden in alone]),
        "last": torch.stack([hidden[-1] for hidden in alone]),
    }
    for pooling, reference in expected.items():
        raw = TransformerEncoder(str(tmp_path), pooling=pooling, normalise=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(raw.encode(TEXTS), reference, atol=2e-6)
        scaled = TransformerEncoder(str(tmp_path), pooling=pooling)  # type: ignore[arg-type]
        np.testing.assert_allclose(scaled.encode(TEXTS), F.normalize(reference, dim=1), atol=2e-6)
        short = TransformerEncoder(str(tmp_path), pooling=pooling, latent_dim=4)  # type: ignore[arg-type]
        np.testing.assert_allclose(short.encode(TEXTS), F.normalize(reference[:, :4], dim=1), atol=2e-6)
    cut = TransformerEncoder(str(tmp_path), normalise=False, max_length=4)
    same = TransformerEncoder(str(tmp_path), normalise=False)
    np.testing.assert_allclose(cut.encode(["to be or not to be"]), same.encode(["to be"]), atol=2e-6)


def test_qwen_like_decoder_with_last_pooling_and_left_padding(tmp_path: Path) -> None:
    model = tiny_encoders.qwen(tmp_path)
    expected = F.normalize(torch.stack([states(model, tmp_path, text)[-1] for text in TEXTS]), dim=1)
    found = TransformerEncoder(str(tmp_path), pooling="last").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert AutoTokenizer.from_pretrained(tmp_path)("my lord")["input_ids"][-1] == 0  # the end token is what is pooled


def test_of_an_encoder_decoder_the_encoder_is_used(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import T5EncoderModel

    model = tiny_encoders.t5(tmp_path)
    expected = torch.stack([states(model.get_encoder(), tmp_path, text).mean(0) for text in TEXTS])
    found = TransformerEncoder(str(tmp_path), normalise=False).encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    half = T5EncoderModel.from_pretrained(tmp_path)
    half.save_pretrained(tmp_path)
    assert "decoder.final_layer_norm.weight" not in load_file(tmp_path / "model.safetensors")
    found = TransformerEncoder(str(tmp_path), normalise=False).encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_absolute_positions_are_right_though_the_tokenizer_pads_on_the_left(tmp_path: Path) -> None:
    model = tiny_encoders.gpt2(tmp_path)
    expected = torch.stack([states(model, tmp_path, text)[-1] for text in TEXTS])
    found = TransformerEncoder(str(tmp_path), pooling="last", normalise=False).encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pool_ignores_padding_on_either_side(side: str) -> None:
    hidden = torch.randn(1, 3, 5)
    mask = torch.tensor([[True, True, True, False, False]])
    padded = torch.cat([hidden, torch.full((1, 2, 5), 1e6)], 1)
    if side == "left":
        padded, mask = padded.flip(1), mask.flip(1)
        hidden = hidden.flip(1)
    torch.testing.assert_close(pool(padded, mask, "mean"), hidden.mean(1))
    torch.testing.assert_close(pool(padded, mask, "cls"), hidden[:, 0])
    torch.testing.assert_close(pool(padded, mask, "last"), hidden[:, -1])


def test_identity_changes_with_weights_and_with_every_option(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path / "a")
    tiny_encoders.bert(tmp_path / "b")
    tiny_encoders.bert(tmp_path / "c", seed=1)
    a, c = str(tmp_path / "a"), str(tmp_path / "c")
    base = TransformerEncoder(a).identity
    assert TransformerEncoder(str(tmp_path / "b")).identity == base  # the place does not matter, the content does
    assert TransformerEncoder(a, batch_size=1).identity == base
    others = [
        TransformerEncoder(c),
        TransformerEncoder(a, pooling="cls"),
        TransformerEncoder(a, normalise=False),
        TransformerEncoder(a, max_length=8),
        TransformerEncoder(a, latent_dim=8),
    ]
    assert len({base, *(other.identity for other in others)}) == 6
    settings = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 5}))
    assert TransformerEncoder(a).identity != base


def test_saved_and_loaded_encoder_verifies_the_weights(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path / "model")
    encoder = TransformerEncoder(str(tmp_path / "model"), pooling="cls", latent_dim=8, max_length=9)
    (tmp_path / "assets").mkdir()
    encoder.save(tmp_path / "assets")
    loaded = load_encoder(tmp_path / "assets")
    assert loaded.identity == encoder.identity
    assert np.array_equal(loaded.encode(TEXTS), encoder.encode(TEXTS))
    tiny_encoders.bert(tmp_path / "model", seed=1)
    changed = load_encoder(tmp_path / "assets")
    with pytest.raises(UsageError, match="its files changed since the latents were made"):
        changed.encode(TEXTS)


def test_dimensions_beyond_the_model_are_refused(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path)
    with pytest.raises(UsageError, match=r"--data.latent_dim 17: embeddings of .* have 16 dimensions"):
        _ = TransformerEncoder(str(tmp_path), latent_dim=17).dim
    with pytest.raises(UsageError, match=r"--data.encoder_max_length 65: .* reads at most 64 tokens"):
        TransformerEncoder(str(tmp_path), max_length=65).encode(TEXTS)


def test_a_model_without_a_limit_reads_as_much_as_any(tmp_path: Path) -> None:
    """XLNet has no largest length, and its config gives -1."""
    tiny_encoders.bert(tmp_path)
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts | {"model_max_length": int(1e30)}))
    XLNetModel(XLNetConfig(vocab_size=20, d_model=16, n_layer=1, n_head=2, d_inner=16)).save_pretrained(tmp_path)
    assert XLNetConfig().max_position_embeddings == -1
    whole = TransformerEncoder(str(tmp_path)).encode(["my lord " * 40])
    assert np.array_equal(whole, TransformerEncoder(str(tmp_path), max_length=82).encode(["my lord " * 40]))
    assert not np.allclose(whole, TransformerEncoder(str(tmp_path), max_length=40).encode(["my lord " * 40]))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_of_the_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    tiny_encoders.bert(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot be loaded \(ValueError: .*tokenizer_config\.json: "):
        _ = TransformerEncoder(str(tmp_path)).identity  # which a run asks for first


def test_pickled_weights_are_refused_and_not_run(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path)
    from safetensors.torch import load_file

    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"only pytorch_model\.bin \(pickles can run code, and are never opened\)"):
        TransformerEncoder(str(tmp_path)).encode(TEXTS)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "adapter.safetensors")
    torch.save(load_file(tmp_path / "adapter.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no file named model\.safetensors"):
        TransformerEncoder(str(tmp_path)).encode(TEXTS)


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path)
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    with pytest.raises(UsageError, match="code from a model's repository is never run"):
        TransformerEncoder(str(tmp_path)).encode(TEXTS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    TransformerEncoder(str(tmp_path)).encode(TEXTS)
    assert not canary.exists()


def test_missing_weights_would_be_random_and_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_encoders.bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    without_pooler = {name: value for name, value in weights.items() if not name.startswith("pooler")}
    save_file(without_pooler, tmp_path / "model.safetensors", metadata={"format": "pt"})
    TransformerEncoder(str(tmp_path)).encode(TEXTS)
    del without_pooler["encoder.layer.0.output.dense.weight"]
    save_file(without_pooler, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"1 weights are not in its files \(encoder\.layer\.0\.output\.dense\.weight"):
        TransformerEncoder(str(tmp_path)).encode(TEXTS)


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers builds one in which every word is unknown."""
    tiny_encoders.bert(tmp_path)
    BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "my": 4, "lord": 5}).save_pretrained(tmp_path)
    TransformerEncoder(str(tmp_path)).encode(["my lord"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"--data\.encoder .*: its tokenizer has no vocabulary \(0 .* download it"):
        TransformerEncoder(str(tmp_path)).encode(TEXTS)


def test_an_unreachable_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"--data.encoder 'nobody/nothing': no such directory.*'tfidf-svd'"):
        _ = TransformerEncoder("nobody/nothing").identity


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
            "",
        ),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, ""),
        (["Transformer", "Pooling"], None, ""),
        (
            ["Transformer", "Pooling", "Dense"],
            {"pooling_mode_mean_tokens": True},
            "declares Dense, which is not computed here",
        ),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "with cls pooling, .* Give --data.pooling cls"),
        (["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, "with last pooling, .* Give --data.pooling last"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "with max_tokens pooling, .* --data.latents"),
    ],
)
def test_modules_of_sentence_transformers_that_are_not_computed_are_refused(
    modules: list[str], pooling: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    tiny_encoders.bert(tmp_path)
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    declared = [
        {"idx": number, "path": paths.get(kind, f"{number}_{kind}"), "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(declared))
    if pooling is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | pooling))
    encoder = TransformerEncoder(str(tmp_path), "mean")
    if not message:
        refuse_other_modules(encoder)
        return
    with pytest.raises(UsageError, match=message):
        refuse_other_modules(encoder)
