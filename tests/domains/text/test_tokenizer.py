import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from accel_train.config import UsageError
from accel_train.domains.text.tokenizer import TextTokenizer, train_tokenizer, transformers_tokenizer
from tests import tiny_encoders

TEXTS = ["To be, or not to be, that is the question.", "My lord -- good night.", "Sweet prince, to be!"] * 40
ODD = ["naïve café", "日本語 テキスト", "🎭 [MASK] and [PAD] spelled out", "a\ttab\nand a line", "  'Tis"]


def test_every_text_comes_back_and_no_text_brings_in_a_mask() -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    tokens = tokenizer.tokenise([*TEXTS, *ODD], 512)
    for i, text in enumerate([*TEXTS, *ODD]):
        ids = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]
        assert tokenizer.decode(ids) == text.strip()
        assert not {tokenizer.pad_id, tokenizer.mask_id} & set(ids.tolist())
    assert tokens.truncated == 0


@pytest.mark.slow
def test_training_is_the_same_in_another_process_with_other_threads() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1])\n"
        "from tests.domains.text.test_tokenizer import TEXTS, ODD\n"
        "from accel_train.domains.text.tokenizer import train_tokenizer\n"
        "print(hashlib.sha256(train_tokenizer(TEXTS + ODD, 400).to_json().encode()).hexdigest())"
    )
    found: set[str] = set()
    for threads in ("1", "4"):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", code, str(Path(__file__).parents[3])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        found.add(done.stdout.strip())
    assert len(found) == 1


def test_truncation_and_padding_facts() -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    long = tokenizer.tokenise(TEXTS[:3], 512)
    cut = tokenizer.tokenise(TEXTS[:3], 4)
    assert cut.offsets.tolist() == [0, 4, 8, 12]
    assert cut.truncated == 3
    for i in range(3):
        assert torch.equal(cut.ids[4 * i : 4 * i + 4], long.ids[long.offsets[i] : long.offsets[i] + 4])
    maskable = tokenizer.maskable()
    assert maskable.shape == (tokenizer.vocab_size,)
    assert (~maskable).nonzero().flatten().tolist() == [tokenizer.pad_id, tokenizer.mask_id]


def test_json_is_read_by_the_library_and_by_us(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.tokenise(TEXTS, 4)
    text = tokenizer.to_json()
    assert Tokenizer.from_str(text).encode("to be, or not to be").ids == (
        tokenizer.tokenise(["to be, or not to be"], 64).ids.tolist()
    )
    again = TextTokenizer.from_json(text, **tokenizer.ids())  # type: ignore[arg-type]
    assert torch.equal(again.tokenise(ODD, 64).ids, tokenizer.tokenise(ODD, 64).ids)
    assert again.to_json() == text


def test_a_transformers_tokenizer_keeps_its_special_tokens_out_of_diffusion(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path)
    tokenizer = transformers_tokenizer(str(tmp_path))
    tokens = tokenizer.tokenise(["to be", "to be or not to be"], 6)
    assert tokens.ids.tolist() == [2, 5, 6, 3, 2, 5, 6, 7, 8, 3]  # [CLS] ... [SEP], the cut text too
    assert tokens.truncated == 1
    assert (tokenizer.pad_id, tokenizer.mask_id) == (0, 4)
    assert tokenizer.special_ids == (0, 2, 3, 4)  # 1 is [UNK]: an unknown word is content
    assert tokenizer.decode(tokens.ids[:4]) == "to be"
    with pytest.raises(UsageError, match=r"--data.max_length 2: the tokenizer puts 2 special tokens"):
        tokenizer.tokenise(["to be"], 2)


def test_missing_mask_and_padding_tokens_are_added_at_the_end(tmp_path: Path) -> None:
    tiny_encoders.qwen(tmp_path)
    tokenizer = transformers_tokenizer(str(tmp_path))
    before = 1 + len(tiny_encoders.WORDS)
    assert {tokenizer.pad_id, tokenizer.mask_id} == {before, before + 1}
    assert tokenizer.vocab_size == before + 2
    assert 0 in tokenizer.special_ids  # the end token


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--data.vocab_size 299: .* at least 300"):
        train_tokenizer(TEXTS, 299)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/nothing", str(tmp_path)):
        with pytest.raises(UsageError, match=r"--data.tokenizer .* cannot be loaded.*Give 'trained'"):
            transformers_tokenizer(name)
