"""A tokenizer and small models made in the test, as there is no Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from accel_train.domains.language import pretrained, tokenizers
from accel_train.domains.language.pretrained import ModelConfig

TEXTS = [
    "Nay, answer me: stand, and unfold yourself.",
    "You come most carefully upon your hour.",
    "'Tis now struck twelve. Get thee to bed, Francisco.",
    "Have you had quiet guard?",
    "I think I hear them. Stand, ho! Who is there?",
]
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template without marks of what the assistant says."""
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}\n{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The same text, with marks."""
REASONING = """{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
  {%- set reasoning = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
  {%- if '</think>' not in message.content %}{% set reasoning = '' %}{% endif %}
  {{- '<|' + message.role + '|>\n' }}
  {%- if message.role == 'assistant' and loop.index0 > ns.asked and (loop.last or reasoning) %}
    {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
  {%- endif %}
  {{- content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
"""The rule of Qwen3's template: reasoning is written for answers to the last message of the user, empty if the last
answer has none, and left out of all earlier ones."""
LLAMA = ModelConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


@cache
def _trained() -> str:
    return tokenizers.train_tokenizer(TEXTS, 320).backend_tokenizer.to_str()


def tokenizer(template: str | None = None) -> Any:
    """A new one each time, because its template and special tokens can be set."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token=tokenizers.BEGIN,
        eos_token=tokenizers.END,
        pad_token=tokenizers.PAD,
    )
    made.chat_template = template
    return made


def model(options: ModelConfig = LLAMA, seed: int = 0) -> Any:
    """In eval mode. Attention far from uniform, so that what a token sees is seen in its logits."""
    config = pretrained.resolve_config(options, tokenizer(), 64)
    torch.manual_seed(seed)
    built: Any = pretrained.build(options, config, load_source=True)
    return built.eval()


def save(folder: Path, options: ModelConfig = LLAMA, template: str | None = None) -> Path:
    """A folder as the Hub would have it: weights, config, tokenizer."""
    made = model(options)
    made.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder
