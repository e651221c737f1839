"""Transformers models of a few thousand random weights, saved as a person would have them on disk."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
WORDS += ["my", "lord", "king", "good", "night", "sweet", "prince"]


def tokenizer_folder(folder: Path, special: list[str], template: str, **tokens: str) -> Any:
    """A word-level fast tokenizer with the given special tokens."""
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=tokens.get("unk_token", special[0])))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = [part for part in template.split() if part != "$A"]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, vocab[name]) for name in names]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **tokens)
    fast.save_pretrained(folder)
    return fast


def bert(folder: Path, seed: int = 0) -> Any:
    """A BERT of width 16 with [CLS] and [SEP] around a text."""
    from transformers import BertConfig, BertModel

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer_folder(folder, special, "[CLS] $A [SEP]", mask_token="[MASK]", **names)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(special) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    return model


def qwen(folder: Path) -> Any:
    """A decoder as Qwen3-Embedding is: left padding, end token appended, no mask and no padding token of its own."""
    from transformers import Qwen3Config, Qwen3Model

    tokenizer_folder(folder, ["<end>"], "$A <end>", eos_token="<end>", padding_side="left")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model = Qwen3Model(config).eval()
    model.save_pretrained(folder)
    return model


def gpt2(folder: Path) -> Any:
    """A decoder with learned absolute positions and a tokenizer that pads on the left."""
    from transformers import GPT2Config, GPT2Model

    tokenizer_folder(folder, ["<end>"], "$A <end>", eos_token="<end>", padding_side="left")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1 + len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    model = GPT2Model(config).eval()
    model.save_pretrained(folder)
    return model


def t5(folder: Path) -> Any:
    """An encoder-decoder, saved whole with its language-model head."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer_folder(folder, ["<pad>", "</s>"], "$A </s>", pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=2 + len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model
