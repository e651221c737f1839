"""From a source of rows to the tokens of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.data.sampler import StepSampler
from accel_train.data.tables.ledger import Span, write_ledger
from accel_train.domains.language import perplexity, prepare, tokenizers
from accel_train.domains.language.packing import IGNORED
from accel_train.domains.language.prepare import DataConfig, LanguageData
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows.forms import Row, parsed
from tests.domains.language import tiny

ANSWER = {"role": "assistant", "content": "Friends."}
LINES = [f"{text} {number}" for number in range(20) for text in tiny.TEXTS]


def prepared(
    folder: Path, *found: Any, model: ModelConfig = tiny.LLAMA, earlier: Path | None = None, **options: Any
) -> LanguageData:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row if isinstance(row, dict) else {"text": row}) for row in found or LINES))
    given = {"path": str(file), "heldout_fraction": 0.2, "max_length": 64, "cache_dir": str(folder / "cache")} | options
    if model.source is None and "tokenizer" not in options:
        given.setdefault("vocab_size", 320)
    return prepare.prepare_data(DataConfig(**given), model, earlier=earlier)


def test_a_named_column_is_read_or_refused(tmp_path: Path) -> None:
    pairs = [{"prompt": "bdy", "completion": f" {number}"} for number in range(len(LINES))]
    rows = [{"body": line} | pair for line, pair in zip(LINES, pairs, strict=True)]
    texts = prepared(tmp_path, *LINES)
    assert prepared(tmp_path, *rows, text_column="body").fingerprint == texts.fingerprint
    with pytest.raises(UsageError, match=r"--data.text_column 'bdy': no row of --data.path .* has it; all 1\d\d have"):
        prepared(tmp_path, *rows, text_column="bdy")
    some = prepared(tmp_path, *rows, {"prompt": "p", "completion": " c"}, text_column="body")
    assert any("1 rows without 'body' (--data.text_column)" in notice for notice in some.notices)


@pytest.mark.parametrize("kind", ["saved", "rows.parquet", "rows.csv", "rows.jsonl"])
def test_a_column_that_no_table_has_is_refused_before_a_row_is_read(kind: str, tmp_path: Path) -> None:
    import datasets

    chats: Any = datasets.Dataset.from_dict({"prompt": ["p"] * len(LINES), "completion": LINES})
    (tmp_path / "tables").mkdir()
    path = tmp_path / "tables" / kind
    if kind == "saved":
        chats.save_to_disk(str(path))
    else:
        write = {".parquet": chats.to_parquet, ".csv": chats.to_csv, ".jsonl": chats.to_json}[path.suffix]
        write(str(path))
    with pytest.raises(UsageError, match=r"no column of .*'completion', 'prompt'. .did you mean .prompt"):
        prepared(tmp_path, path=str(path), text_column="promt")
    assert {folder.name for folder in (tmp_path / "cache").iterdir()} <= {"sha256"}
    # Held-out rows in a file of their own may have what the table lacks.
    named = prepared(
        tmp_path,
        *({"promt": line} for line in LINES[:9]),
        path=str(path),
        text_column="promt",
        heldout_path=str(tmp_path / "rows.jsonl"),
        heldout_fraction=0.0,
    )
    assert any("rows without 'promt' (--data.text_column)" in notice for notice in named.notices)


@pytest.mark.parametrize(
    ("content", "message"), [("", "contains no usable row"), ('{"a"\n{"b": "c"}', r"other.jsonl:1: not JSON")]
)
def test_a_column_of_files_without_a_row_is_not_what_is_missing(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message):
        prepared(tmp_path, path=str(tmp_path / "other.jsonl"), text_column="body")


def test_another_column_of_a_dataset_is_other_data(tmp_path: Path) -> None:
    import datasets

    columns = {"text": LINES, "body": [line[::-1] for line in LINES]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    assert prepared(tmp_path, path=path).fingerprint != prepared(tmp_path, path=path, text_column="body").fingerprint


def test_a_template_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": line}]} for line in LINES]
    found: list[str] = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "chat.jinja").write_text(tiny.CHATML, encoding)
        found.append(prepared(tmp_path, *rows, chat_template=str(tmp_path / "chat.jinja")).fingerprint)
    assert found[0] == found[1]


def test_of_chats_a_template_with_a_date_is_said(tmp_path: Path) -> None:
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%F') }}" + tiny.CHATML)
    chats = [{"prompt": [{"role": "user", "content": line}], "completion": [ANSWER]} for line in LINES]
    for rows, said in ((LINES, False), (chats, True)):
        data = prepared(tmp_path, *rows, chat_template=str(tmp_path / "dated.jinja"))
        assert any("writes today's date" in notice for notice in data.notices) == said


def test_files_of_a_run_among_the_rows_are_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "run" / "checkpoints" / "one").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(LINES))
    (folder / "run" / "mine.txt").write_text("there before the run\n")
    paths = (str(folder), f"{folder}/**/*.*")
    given: dict[str, Any] = {
        "cache_dir": str(tmp_path / "cache"),
        "vocab_size": 320,
        "heldout_fraction": 0.2,
        "max_length": 64,
    }
    first = [prepare.prepare_data(DataConfig(path=path, **given), tiny.LLAMA) for path in paths]
    for run in (folder, folder / "run"):
        for name in ("run.json", "config.yaml", "metrics.jsonl", "sample_losses.jsonl"):
            (run / name).write_text('{"event": "start"}\n')
    (folder / "run" / "checkpoints" / "one" / "merges.txt").write_text("a b\n")
    second = [prepare.prepare_data(DataConfig(path=path, **given), tiny.LLAMA) for path in paths]
    assert [data.fingerprint for data in second] == [data.fingerprint for data in first]
    assert first[0].fingerprint != first[1].fingerprint, "mine.txt is data at both starts"
    assert "files of runs are left out" in second[1].notices[0]
    with pytest.raises(UsageError, match="no field 'text'"):
        prepare.prepare_data(DataConfig(path=str(folder / "metrics.jsonl"), **given), tiny.LLAMA)


def test_tokens_of_both_splits_and_their_unigrams(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    assert data.train.texts + data.heldout.texts == len(LINES)
    assert 5 < data.heldout.texts < 45
    batch = data.train.batch(list(range(len(data.train))))
    targets = batch["labels"][batch["labels"] != IGNORED]
    assert float(data.unigram.exp().sum()) == pytest.approx(1)
    token = int(targets.mode().values)
    count = int((targets == token).sum())
    expected = math.log((count + 1) / (len(targets) + len(data.unigram)))
    assert float(data.unigram[token]) == pytest.approx(expected, rel=1e-5)
    assert prepared(tmp_path).fingerprint == data.fingerprint
    assert "training rows of data" in data.notices[0]
    assert "% filled" in data.notices[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"heldout_fraction": 0.4},
        {"vocab_size": 300},
        {"max_length": 24},
        {"packing": False},
        {"chat_template": "chat.jinja"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_changes_the_data(options: dict[str, Any], tmp_path: Path) -> None:
    rows = [*LINES, {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}]
    (tmp_path / "plain.jinja").write_text(tiny.CHATML)
    (tmp_path / "chat.jinja").write_text(tiny.CHATML.replace("<|", "<<"))
    base = {"chat_template": str(tmp_path / "plain.jinja")}
    changed = base | options
    changed["chat_template"] = str(tmp_path / Path(changed["chat_template"]).name)
    assert prepared(tmp_path, *rows, **base).fingerprint != prepared(tmp_path, *rows, **changed).fingerprint


def test_heldout_rows_of_another_file_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("\n".join(LINES[:7]))
    data = prepared(tmp_path, heldout_path=str(tmp_path / "held.txt"), heldout_fraction=0)
    assert (data.train.texts, data.heldout.texts) == (len(LINES) - 7, 7)


def test_another_heldout_file_leaves_out_its_own_rows(tmp_path: Path) -> None:
    """With the same cache, where the training rows of the first are."""
    for lines in (LINES[:7], LINES[7:10]):
        (tmp_path / "held.txt").write_text("\n".join(lines))
        data = prepared(tmp_path, heldout_path=str(tmp_path / "held.txt"), heldout_fraction=0)
        assert (data.train.texts, data.heldout.texts) == (len(LINES) - len(lines), len(lines))


@pytest.mark.parametrize("own_file", [False, True])
def test_a_tokenizer_learns_nothing_of_heldout_rows(
    own_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[str] = []
    sampled = tokenizers.sampled

    def recorded(texts: Any) -> list[str]:
        learned.extend(texts)
        return sampled(learned)

    monkeypatch.setattr(tokenizers, "sampled", recorded)
    options: dict[str, Any] = {}
    if own_file:
        (tmp_path / "held.txt").write_text("\n".join(LINES[:7]))
        options = {"heldout_path": str(tmp_path / "held.txt"), "heldout_fraction": 0}
    data = prepared(tmp_path, **options)
    assert len(learned) == data.train.texts < len(LINES)
    numbers = range(data.heldout.texts)
    heldout = [data.tokenizer.decode(data.heldout.text(n)[0], skip_special_tokens=True).strip() for n in numbers]
    assert sorted([*learned, *heldout]) == sorted(LINES)


def test_another_tokenizer_with_the_same_tokens_is_other_data(tmp_path: Path) -> None:
    prints: list[str] = []
    for piece in ("<first>", "<second>"):
        tokenizer = tiny.tokenizer()
        tokenizer.add_tokens([piece])
        tokenizer.save_pretrained(tmp_path / piece)
        prints.append(prepared(tmp_path, tokenizer=str(tmp_path / piece)).fingerprint)
    assert prints[0] != prints[1]


def test_a_split_is_trained_on_beside_another_or_a_file(tmp_path: Path) -> None:
    import datasets

    saved = str(tmp_path / "saved")
    splits = {"first": LINES[:60], "second": LINES[60:]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in splits.items()}).save_to_disk(saved)
    (tmp_path / "held.txt").write_text("\n".join(LINES[60:]))
    held = str(tmp_path / "held.txt")
    from_file = prepared(tmp_path, path=saved, split="first", heldout_path=held, heldout_fraction=0)
    from_split = prepared(tmp_path, path=saved, split="first", heldout_path="split=second", heldout_fraction=0)
    assert (from_file.train.texts, from_file.heldout.texts) == (60, 40)
    assert from_split.fingerprint == from_file.fingerprint
    other = prepared(tmp_path, path=held, split="first", heldout_path=saved, heldout_fraction=0)
    assert (other.train.texts, other.heldout.texts) == (40, 60)
    with pytest.raises(UsageError, match=r"has the splits \['first', 'second'\]"):
        prepared(tmp_path, path=saved, split="first", heldout_path="split=third", heldout_fraction=0)
    with pytest.raises(
        UsageError, match=r"--data.heldout_path 'split=second': --data.path .*rows.jsonl' has no splits"
    ):
        prepared(tmp_path, heldout_path="split=second", heldout_fraction=0)
    with pytest.raises(UsageError, match=r"data.split: valid: has no effect .*because files have no splits"):
        prepared(tmp_path, split="valid", heldout_path=held, heldout_fraction=0)


def test_a_split_of_a_dataset_without_splits_is_refused(tmp_path: Path) -> None:
    import datasets

    for name, lines in (("saved", LINES[:60]), ("other", LINES[60:])):
        datasets.Dataset.from_dict({"text": lines}).save_to_disk(str(tmp_path / name))
    saved, other = str(tmp_path / "saved"), str(tmp_path / "other")
    for more in ({}, {"more_paths": (other,)}, {"heldout_path": other, "heldout_fraction": 0}):
        with pytest.raises(UsageError, match=r"data.split: valid: has no effect with --data.path '.*saved'"):
            prepared(tmp_path, path=saved, split="valid", **more)
    with pytest.raises(
        UsageError, match=r"--data.path '.*saved' has no splits, because files and datasets saved without"
    ):
        prepared(tmp_path, path=saved, heldout_path="split=valid", heldout_fraction=0)


def test_a_source_that_is_held_out_as_a_whole_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("\n".join(LINES))
    held = str(tmp_path / "held.txt")
    with pytest.raises(
        UsageError, match=r"--data\.path .*: all of its rows are held out, because --data\.heldout_path '.*held"
    ):
        prepared(tmp_path, heldout_path=held, heldout_fraction=0)
    # Bad rows are no held-out rows.
    with pytest.raises(UsageError, match=r"--data\.path .* contains no usable row \(1 bad rows\)"):
        prepared(tmp_path, {"text": 3}, heldout_path=held, heldout_fraction=0, max_bad_rows=1)


@pytest.mark.parametrize(("content", "bad"), [("", 0), ('{"text": ""}\n', 1)])
def test_held_out_rows_that_cannot_be_used_are_named_by_their_option(content: str, bad: int, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(content)
    given: dict[str, Any] = {"heldout_path": str(tmp_path / "held.jsonl"), "heldout_fraction": 0}
    with pytest.raises(
        UsageError, match=rf"^--data.heldout_path '.*held.jsonl' contains no usable row \({bad} bad rows"
    ):
        prepared(tmp_path, max_bad_rows=bad, **given)
    if bad:
        with pytest.raises(UsageError, match=r"^--data.heldout_path: .*held.jsonl:1: 'text' is empty"):
            prepared(tmp_path, **given)
    (tmp_path / "held.csv").write_text('text\n"a",b,c\n')
    with pytest.raises(UsageError, match=r"^--data.heldout_path '.*held.csv' cannot be read"):
        prepared(tmp_path, heldout_path=str(tmp_path / "held.csv"), heldout_fraction=0)


def test_the_tokenizer_is_that_of_the_model_or_another(tmp_path: Path) -> None:
    tiny.save(tmp_path / "model", template=tiny.CHATML)
    model = ModelConfig(source=str(tmp_path / "model"))
    assert prepared(tmp_path, model=model).tokenizer.chat_template == tiny.CHATML
    other = tokenizers.train_tokenizer(tiny.TEXTS, 310)
    other.save_pretrained(tmp_path / "other")
    assert len(prepared(tmp_path, model=model, tokenizer=str(tmp_path / "other")).tokenizer) == 310
    with pytest.raises(UsageError, match=r"tokenizer '.*nothing' cannot be loaded"):
        prepared(tmp_path, tokenizer=str(tmp_path / "nothing"))


def test_a_model_without_a_pad_token_is_padded_and_it_is_said(tmp_path: Path) -> None:
    tiny.save(tmp_path / "model")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = tmp_path / "model" / name
        if file.exists():
            fields = json.loads(file.read_text())
            fields.pop("pad_token", None)
            file.write_text(json.dumps(fields))
    data = prepared(tmp_path, model=ModelConfig(source=str(tmp_path / "model")))
    assert any("no pad token" in notice for notice in data.notices)
    batch = data.train.batch([0])
    assert (batch["labels"][0, int(batch["length"]) :] == IGNORED).all()


def mixture(folder: Path, *repeats: int, **options: Any) -> LanguageData:
    """The data of 50 rows in a table and of 30 in a text."""
    table, text = folder / "table.jsonl", folder / "text.txt"
    table.write_text("\n".join(json.dumps({"text": line}) for line in LINES[:50]))
    text.write_text("\n".join(LINES[50:80]))
    paths = {"path": str(table), "more_paths": (str(text),)}
    source = ModelConfig(source=str(tiny.save(folder / "model", template=tiny.CHATML)))
    return prepared(folder, model=source, **(paths | {"repeats": repeats} | options))


def test_a_mixture_is_its_sources_in_turn_as_often_as_asked(tmp_path: Path) -> None:
    """The same tokens as of one file that has the rows as often."""
    (tmp_path / "held.txt").write_text("\n".join(LINES[80:90]))
    (tmp_path / "one.txt").write_text("\n".join(2 * LINES[:50] + 3 * LINES[50:80]))
    held: dict[str, Any] = {"heldout_path": str(tmp_path / "held.txt"), "heldout_fraction": 0}
    found = mixture(tmp_path, 2, 3, **held)
    expected = mixture(tmp_path, path=str(tmp_path / "one.txt"), more_paths=(), **held)
    assert found.fingerprint == expected.fingerprint
    assert (found.train.texts, found.heldout.texts) == (2 * 50 + 3 * 30, 10)
    assert found.notices[0] == f"an epoch has 2 x {tmp_path / 'table.jsonl'}, 3 x {tmp_path / 'text.txt'}"
    assert mixture(tmp_path, **held).fingerprint != found.fingerprint


def test_of_repeated_rows_the_held_out_and_the_bad_ones_count_once(tmp_path: Path) -> None:
    once, often = mixture(tmp_path), mixture(tmp_path, 2, 3)
    assert 0 < once.heldout.texts == often.heldout.texts
    assert once.train.texts + once.heldout.texts == 80
    held_of_text = mixture(tmp_path, 1, 2).train.texts - once.train.texts  # what a second time of the text adds
    assert often.train.texts == 2 * (once.train.texts - held_of_text) + 3 * held_of_text
    heldout = [data.heldout.batch(list(range(len(data.heldout)))) for data in (once, often)]
    torch.testing.assert_close(*heldout, rtol=0, atol=0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(json.dumps({"text": text}) for text in (*LINES[80:90], None)))
    assert "1 bad rows left out" in mixture(tmp_path, 1, 3, more_paths=(str(bad),), max_bad_rows=1).notices
    (tmp_path / "held.txt").write_text("\n".join(LINES[60:90]))
    excluded = mixture(tmp_path, 1, 3, heldout_path=str(tmp_path / "held.txt"), heldout_fraction=0.0).notices
    assert "20 rows left out of training, because held-out rows have their text" in excluded


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_source_of_texts_is_read_beside_one_with_a_named_column(kind: str, tmp_path: Path) -> None:
    """One option names the column of all sources."""
    import datasets

    more = tmp_path / f"more.{kind}"
    # With another text beside it, because a table is read by its columns.
    rows = datasets.Dataset.from_dict({"title": ["t"] * 50, "text": LINES[50:]})
    {"jsonl": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}[kind](str(more))
    bodies = [{"body": line} for line in LINES[:50]]
    found = prepared(tmp_path, *bodies, text_column="body", more_paths=(str(more),))
    assert found.fingerprint == prepared(tmp_path, *LINES).fingerprint
    assert "50 rows without 'body' (--data.text_column) are read from 'text', messages, or prompt and completion" in (
        found.notices
    )
    # The name is somewhere in the rows, so that they must be read to see that no row has the column.
    texts = [{"text": line, "note": "bdy"} for line in LINES]
    with pytest.raises(UsageError, match=r"'bdy': no row of --data.path .* has it; all 100 have 'text', messages"):
        prepared(tmp_path, *texts, text_column="bdy")
    more.unlink()
    (tmp_path / "more.jsonl").write_text(json.dumps({"story": "s"}))
    both = r"set --data.text_column story \(if other rows have 'body', write this one as 'text' instead\)"
    with pytest.raises(UsageError, match=both):
        prepared(tmp_path, *bodies, text_column="body", more_paths=(str(tmp_path / "more.jsonl"),))


def test_each_source_of_a_mixture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data.more_paths '.*missing.jsonl': .* does not exist"):
        mixture(tmp_path, more_paths=(str(tmp_path / "missing.jsonl"),))
    (tmp_path / "bad.jsonl").write_text('{"text": "a b"}\n{"text": 3}')
    with pytest.raises(UsageError, match=r"^--data.more_paths: .*bad.jsonl:2: 'text' is int"):
        mixture(tmp_path, more_paths=(str(tmp_path / "bad.jsonl"),))
    with pytest.raises(UsageError, match=r"no column of --data.path '.*table.jsonl' --data.more_paths '.*more.jsonl'"):
        (tmp_path / "more.jsonl").write_text('{"text": "a b"}')
        mixture(tmp_path, more_paths=(str(tmp_path / "more.jsonl"),), text_column="body")


def test_a_source_that_adds_nothing_to_a_mixture_is_refused(tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    one = "one row alone"
    (tmp_path / "held.txt").write_text("\n".join([one, *LINES[:3]]))
    held: dict[str, Any] = {"heldout_path": str(tmp_path / "held.txt"), "heldout_fraction": 0.0}
    for content, why, options in (
        ("", r"0 bad rows, 0 held out", {}),
        ('{"text": 3}\n{"text": 4}', r"2 bad rows, 0 held out", {}),
        (json.dumps({"text": one}), r"0 bad rows, 1 held out", held),
    ):
        more.write_text(content)
        with pytest.raises(UsageError, match=rf"^--data.more_paths '{more}': this source of the mixture .*\({why}\)"):
            mixture(tmp_path, 1, 3, more_paths=(str(more),), max_bad_rows=2, **options)


def test_a_source_given_twice_is_found_however_it_is_named(tmp_path: Path) -> None:
    mixture(tmp_path)
    table = tmp_path / "table.jsonl"
    (tmp_path / "link.jsonl").symlink_to(table)
    (tmp_path / "copy.jsonl").write_bytes(table.read_bytes())
    for other, why in (
        (f"{tmp_path}/./table.jsonl", "both have .*table.jsonl"),
        (str(tmp_path / "link.jsonl"), "both have .*table.jsonl"),
        (f"{tmp_path}/t*", "both have .*table.jsonl"),
        (str(tmp_path / "copy.jsonl"), "both have the same rows"),
    ):
        with pytest.raises(UsageError, match=rf"a source is named twice: '{table}' and .*, {why}.*--data.repeats"):
            mixture(tmp_path, more_paths=(other,))


def test_a_row_with_nothing_to_learn_is_counted_as_bad_alone(tmp_path: Path) -> None:
    nothing = {"prompt": " ".join(tiny.TEXTS * 3), "completion": " x"}
    data = prepared(tmp_path, *LINES, nothing, heldout_fraction=0.01, max_bad_rows=1)
    rows = f"{data.train.texts:,} training rows of data, {data.heldout.texts:,} held out"
    assert data.train.texts + data.heldout.texts == len(LINES)
    assert {rows, "1 bad rows left out"} <= set(data.notices)
    assert not any("are cut" in notice for notice in data.notices)
    (tmp_path / "named").mkdir()
    bodies = [{"body": line} for line in LINES]
    named = prepared(tmp_path / "named", *bodies, nothing, text_column="body", max_bad_rows=1)
    assert not any("rows without 'body'" in notice for notice in named.notices)


def test_texts_that_are_too_long_are_split_or_cut_and_it_is_said(tmp_path: Path) -> None:
    long = " ".join(tiny.TEXTS * 3)
    pair = {"prompt": "Who is there?", "completion": f" {long}"}
    data = prepared(tmp_path, *LINES, long, pair, heldout_fraction=0.01)
    tokens = [len(data.tokenizer(text)["input_ids"]) + 1 for text in (long, f"Who is there? {long}")]
    most = f"the longest row has {max(tokens)}"
    assert f"1 training texts longer than 64 tokens are split; {most}" in data.notices
    assert f"1 training chats or completions are cut to 64 tokens; {most}" in data.notices
    whole = prepared(tmp_path, *LINES, long, pair, heldout_fraction=0.01, max_length=1024)
    assert not any("are split" in notice or "are cut" in notice for notice in whole.notices)


def test_chats_with_a_text_for_each_answer_are_counted(tmp_path: Path) -> None:
    template = tmp_path / "reasoning.jinja"
    template.write_text(tiny.REASONING)
    user, answer = {"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Friends."}
    chats = [{"messages": [{"role": "user", "content": line}, answer] * 3} for line in LINES[:2]]
    single = {"messages": [user, answer]}
    options: dict[str, Any] = {"heldout_fraction": 0.01, "max_length": 512, "chat_template": str(template)}
    data = prepared(tmp_path, *LINES, *chats, single, **options)
    assert data.train.texts + data.heldout.texts == len(LINES) + 2 * 3 + 1
    (notice,) = [notice for notice in data.notices if notice.startswith("2 chats become one text per answer")]
    tokens = [data.train.text(number)[0].tolist() for number in range(data.train.texts)]
    answers = [text for text in tokens if data.tokenizer.decode(text[-12:]).endswith("<|end|>\n")]
    repeated = sorted(map(len, answers))[1:5]  # of six texts and the single one, without the two longest
    assert f"This repeats {sum(repeated):,} tokens of earlier turns" in notice
    (tmp_path / "none").mkdir()
    none = prepared(tmp_path / "none", *LINES, single, **options)
    assert not any("become one text per answer" in notice for notice in none.notices)


def test_of_a_few_rows_one_is_held_out(tmp_path: Path) -> None:
    """A share of 4 % is less than one of them, and by chance none may fall under it."""
    for count in (2, 3, 20):
        folder = tmp_path / str(count)
        folder.mkdir()
        data = prepared(folder, *LINES[:count], heldout_fraction=1e-9)
        assert (data.train.texts, data.heldout.texts) == (count - 1, 1)
        assert f"{count - 1} training rows of data, 1 held out" in data.notices
        assert any("no row falls under --data.heldout_fraction 1e-09" in notice for notice in data.notices)
        again = prepared(folder, *LINES[:count], heldout_fraction=1e-9)
        assert again.fingerprint == data.fingerprint
    (tmp_path / "bad").mkdir()
    bad = prepared(tmp_path / "bad", *LINES[:3], {"text": ""}, heldout_fraction=1e-9, max_bad_rows=1)
    assert "1 bad rows left out" in bad.notices
    (tmp_path / "same").mkdir()
    with pytest.raises(UsageError, match="all 2 rows have the same text, and equal rows are either all trained on"):
        prepared(tmp_path / "same", "Stand, ho!", "Stand, ho!", heldout_fraction=1e-9)


def test_only_rows_with_the_text_of_heldout_ones_are_left_out(tmp_path: Path) -> None:
    """Not those with its words: formulas differ in signs."""
    sums, products = ([f"What is {n} {sign} {n}?" for n in range(50)] for sign in "+*")
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"text": text}) + "\n" for text in sums))
    mine = [*products, *(f" {text} " for text in sums[:7])]
    data = prepared(tmp_path, *mine, heldout_path=str(heldout), heldout_fraction=0)
    assert data.train.texts == 50
    left_out = "7 rows left out of training, because held-out rows have their text"
    assert left_out in data.notices


def test_a_row_of_several_forms_is_read_by_the_first_and_it_is_said(tmp_path: Path) -> None:
    forms: dict[str, dict[str, Any]] = {
        "messages": {"messages": [{"role": "user", "content": "m"}, ANSWER]},
        "conversations": {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "Me."}]},
        "prompt and completion": {"prompt": "p", "completion": " x"},
        "text": {"text": "plain"},
        "instruction and output": {"instruction": "i", "output": "o"},
    }
    names = list(forms)
    for first, others in ((name, names[number:]) for number, name in enumerate(names)):
        whole = {key: value for name in others for key, value in forms[name].items()}
        found, alone = parsed([("1", whole), ("2", forms[first])], "text")
        assert isinstance(found, Row)
        assert isinstance(alone, Row)
        assert found == dataclasses.replace(alone, place="1", unread=tuple(others[1:]))
    (tmp_path / "held.txt").write_text("Who is there?")
    held: dict[str, Any] = {"heldout_path": str(tmp_path / "held.txt"), "heldout_fraction": 0}
    several = [{"text": line} | forms["instruction and output"] for line in LINES]
    data = prepared(tmp_path, *several, *[forms["prompt and completion"] | forms["text"]] * 3, **held)
    notices = [notice.split(", which")[0] for notice in data.notices if "is not read" in notice]
    assert notices == ["3 rows also have text", "100 rows also have instruction and output"]


def test_texts_beside_a_named_column_are_counted(tmp_path: Path) -> None:
    asked = [{"question": line, "answer": "x", "note": "" if line == LINES[0] else "y"} for line in LINES]
    data = prepared(tmp_path, *asked, {"note": "z"}, text_column="question", heldout_fraction=0.01, max_bad_rows=1)
    train = data.notices[0].split(" ")[0]
    (notice,) = (notice for notice in data.notices if "(--data.text_column)" in notice)
    assert notice.startswith("only 'question' (--data.text_column) is trained on")
    assert f"not read: 'answer' ({train} rows), 'note' (" in notice


def test_messages_of_unknown_roles_are_counted(tmp_path: Path) -> None:
    """A template may write any role, and only the assistant's is learned."""
    (tmp_path / "plain.jinja").write_text(tiny.CHATML)
    user = {"role": "user", "content": "Who?"}
    chats = [
        {"messages": [user, ANSWER, user, {"role": role, "content": f"{n}"}]}
        for n, role in enumerate(["asistant"] * 3 + ["narrator", "tool"])
    ]
    options: dict[str, Any] = {"heldout_fraction": 0.001, "chat_template": str(tmp_path / "plain.jinja")}
    data = prepared(tmp_path, *LINES, *chats, **options)
    (notice,) = (notice for notice in data.notices if "unknown roles" in notice)
    assert "never learned: 'asistant' (did you mean 'assistant'?): 3, 'narrator': 1. Only the role" in notice
    # A template may mark what any role says.
    said = "{% generation %}{{ message.content }}{% endgeneration %}"
    (tmp_path / "plain.jinja").write_text(
        f"{{% for message in messages %}}<|{{{{ message.role }}}}|>{said}{{% endfor %}}"
    )
    data = prepared(tmp_path, *LINES, *chats, **options)
    (notice,) = (notice for notice in data.notices if "unknown roles" in notice)
    assert "'narrator': 1. They are learned where the chat template marks them ({% generation %}), which" in notice


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    """Named or trained, in a new run; one with more tokens is taken, and a resume is bound to its checkpoint."""
    source = ModelConfig(source=str(tiny.save(tmp_path / "base")))
    tokenizers.train_tokenizer(["quite other words"] * 9, 320).save_pretrained(tmp_path / "other")
    for name in (str(tmp_path / "other"), tokenizers.TRAINED):
        with pytest.raises(UsageError, match=rf"--data.tokenizer {name}: \d+ of \d+ ids stand for different pieces"):
            prepared(tmp_path, *[f"{line} zebra" for line in LINES], model=source, tokenizer=name)
    more = tiny.tokenizer()
    more.add_tokens(["<|end|>"], special_tokens=True)
    more.save_pretrained(tmp_path / "more")
    assert "<|end|>" in prepared(tmp_path, model=source, tokenizer=str(tmp_path / "more")).tokenizer.get_vocab()
    (tmp_path / "base" / "tokenizer.json").unlink()
    data = prepared(tmp_path, model=source, tokenizer=str(tmp_path / "other"))
    assert any("has no tokenizer that can be loaded" in notice for notice in data.notices)


def test_what_the_template_does_not_write_is_counted(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(tiny.CHATML)
    user, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Friends."}
    thought = {"messages": [user, {**answer, "reasoning_content": "A ghost?"}]}
    options: dict[str, Any] = {"heldout_fraction": 0.01, "chat_template": str(tmp_path / "plain.jinja")}
    data = prepared(tmp_path, *LINES, thought, **options)
    assert any("1 chats have reasoning_content that the chat template does not write" in n for n in data.notices)
    assert data.answer_end is None
    assert any("does not end an answer with a special token" in notice for notice in data.notices)
    (tmp_path / "texts").mkdir()
    texts = prepared(tmp_path / "texts", *LINES, **options)
    assert not any("special token" in notice for notice in texts.notices)


def test_a_row_of_which_nothing_is_left_to_learn_is_named(tmp_path: Path) -> None:
    pair = {"prompt": " ".join(tiny.TEXTS * 3), "completion": " Friends."}
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "heldout_fraction": 0.01}
    with pytest.raises(UsageError, match=r"rows.jsonl:101: nothing to learn in its first 64 tokens .* starts at") as no:
        prepared(tmp_path, *LINES, pair, **options)
    found = re.search(r"starts at token (\d+); give --data.max_length (\d+) or more\. Correct the row", str(no.value))
    assert found is not None
    first, enough = map(int, found.groups())
    assert first <= enough < 2 * first
    for length in (first, enough):
        data = prepared(tmp_path, *LINES, pair, **options, max_length=length)
        assert data.train.texts + data.heldout.texts == len(LINES) + 1
    with pytest.raises(UsageError, match=rf"starts at token {first}; give --data.max_length {enough}"):
        prepared(tmp_path, *LINES, pair, **options, max_length=first - 1)
    user = {"role": "user", "content": "Who?"}
    (tmp_path / "plain.jinja").write_text(tiny.CHATML)
    with pytest.raises(UsageError, match=r"none of its \d+ tokens is trained \(the chat template, weights of 0\)"):
        template = str(tmp_path / "plain.jinja")
        prepared(tmp_path, *LINES, {"messages": [user, {**ANSWER, "weight": 0}]}, chat_template=template)
    data = prepared(tmp_path, *LINES, pair, max_bad_rows=1)
    assert "1 bad rows left out" in data.notices


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            tiny.CHATML,
            r"its first message is the assistant's, and the chat template cannot write .*Begin the chat with",
        ),
        (
            tiny.CHATML + "{{ raise_exception('no') if messages[0]['role'] != 'user' }}",
            r"the chat template refuses its messages .*no",
        ),
        (
            tiny.MARKED + "{{ raise_exception('no') if messages[0]['role'] != 'user' }}",
            r"the chat template refuses its messages .*no",
        ),
    ],
    ids=["found", "refused", "marked"],
)
def test_a_chat_that_the_template_does_not_take_is_a_bad_row(template: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    template_file = str(tmp_path / "chat.jinja")
    chat = {"messages": [{"role": "assistant", "content": "Who is there?"}]}
    with pytest.raises(UsageError, match=rf"rows.jsonl:101: {message}.*--data.max_bad_rows \(now 0\)") as refused:
        prepared(tmp_path, *LINES, chat, chat_template=template_file)
    assert "empty conversation" not in str(refused.value)
    data = prepared(tmp_path, *LINES, chat, chat_template=template_file, max_bad_rows=1)
    assert "1 bad rows left out" in data.notices


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}
    with pytest.raises(UsageError, match=r"rows.jsonl:101 has messages, but the tokenizer has no chat template"):
        prepared(tmp_path, *LINES, chat)
    with pytest.raises(UsageError, match=r"--data.chat_template 'nothing.jinja' cannot be read"):
        prepared(tmp_path, chat_template="nothing.jinja")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "--data.max_length 1: a row needs 2 tokens"),
        ({"heldout_fraction": 0.0}, "leaves nothing to evaluate on"),
        (
            {"more_paths": ("b",), "repeats": (1, 2, 3)},
            "repeats 1 2 3: 3 numbers, but 2 are required: one for --data.path",
        ),
        ({"path": "a", "more_paths": ("b", "a")}, "--data.path 'a' --data.more_paths 'b' 'a': a source is named twice"),
        ({"tokenizer": "x", "vocab_size": 300}, "data.vocab_size: 300: has no effect with data.tokenizer: x"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataConfig(**options)


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data.vocab_size 200: 256 pieces are single bytes and 3 are special"):
        prepared(tmp_path, vocab_size=200)


def test_one_row_leaves_none_to_evaluate_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1 training and 0 held-out rows|0 training and 1 held-out rows"):
        prepared(tmp_path, "one row alone")


def test_equal_rows_are_all_on_one_side(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"all 5 rows have the same text, .* add other rows, or give --data.heldout_path"
    ):
        prepared(tmp_path, *["one row again"] * 5)


def test_too_few_packed_rows_are_said_to_be_packed(tmp_path: Path) -> None:
    """Of many texts, which --data.no_packing or shorter rows would make enough."""
    data = prepared(tmp_path, *LINES)
    rows = len(data.train)
    says = (
        rf"the dataset has {rows} samples.* use more data, --data.no_packing or a smaller --data.max_length: a sample "
        rf"is a packed row of 64 tokens, and {data.train.texts} texts fill {rows}$"
    )
    with pytest.raises(UsageError, match=says):
        StepSampler(rows, 64, 0, more=data.more_samples)
    assert prepared(tmp_path, *LINES, packing=False).more_samples == "use more data"


def test_perplexity_is_weighted_by_tokens() -> None:
    """Closed form: logits that give every target the same probability, and uniform unigrams."""
    labels = torch.tensor([[IGNORED, 1, 2, 3], [IGNORED, IGNORED, 4, IGNORED], [IGNORED, 1, 1, 1]])
    batch = {"labels": labels, "weight": torch.tensor([1.0, 1.0, 0.0])}
    logits = torch.zeros(3, 4, 8)
    logits[1] = 5.0 * torch.nn.functional.one_hot(torch.tensor(4), 8)
    expected = perplexity.targets(batch)
    found_of = perplexity.losses_and_hits(logits.flatten(0, 1), expected.flatten()).view(3, 4, 2)
    sums = perplexity.metric_sums(found_of, expected, torch.full((8,), -math.log(8)))
    assert int(sums["tokens"]) == int(perplexity.trained_tokens(batch).sum()) == 4
    found = perplexity.metrics_from_sums(sums)
    certain = math.log(1 + 7 * math.exp(-5))
    assert found["nll"] == pytest.approx((3 * math.log(8) + certain) / 4, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["unigram_perplexity"] == pytest.approx(8)
    assert found["accuracy"] == pytest.approx(1 / 4)
    assert tuple(found) == perplexity.METRICS
    assert "perplexity 20, 1.25 times the 16 of unigrams" in perplexity.summary(
        {"perplexity": 20.0, "unigram_perplexity": 16.0, "accuracy": 0.5}
    )


def test_losses_of_logits_in_bf16_are_summed_in_fp32() -> None:
    logits = torch.randn(2, 64, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.arange(128).view(2, 64)
    found = perplexity.losses(logits.flatten(0, 1), expected.flatten()).view_as(expected).sum(-1)
    exact = -logits.double().log_softmax(-1).gather(-1, expected[..., None]).sum((1, 2))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_a_diverged_model_has_a_perplexity() -> None:
    sums = {"nll": 8000.0, "unigram_nll": 8.0, "correct": 0.0, "tokens": 4.0}
    found = perplexity.metrics_from_sums({name: torch.tensor(value) for name, value in sums.items()})
    assert found["nll"] == 2000
    assert 1e300 < found["perplexity"] < math.inf


def test_tokens_of_rows_that_keep_processes_in_step_are_not_counted() -> None:
    assert (
        int(perplexity.real_tokens({"length": torch.tensor([5, 7, 3]), "weight": torch.tensor([1.0, 0.0, 1.0])})) == 8
    )


@pytest.mark.parametrize("changed", ["refuse", "allow"])
def test_a_resume_keeps_the_trained_tokenizer_whatever_the_rows(changed: str, tmp_path: Path) -> None:
    """Also those that --allow data_fingerprint takes without a word in data.changed."""
    first = prepared(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    first.tokenizer.save_pretrained(checkpoint)
    options = {"data.vocab_size": 320, "data.tokenizer": None}
    (checkpoint / "experiment.json").write_text(json.dumps({"options": options}))
    (checkpoint / "assets").mkdir()
    write_ledger(checkpoint / "assets", [Span(0, first.fingerprint, len(first.train))])
    resume = {"changed": changed, "earlier": checkpoint / "assets"}
    again = prepared(tmp_path, **resume)
    assert (again.fingerprint, again.notices) == (first.fingerprint, first.notices)
    other = [f"entirely other words, number {number}" for number in range(200)]
    resumed = prepared(tmp_path, *other, **resume)
    assert (
        resumed.tokenizer.get_vocab() == first.tokenizer.get_vocab() != prepared(tmp_path, *other).tokenizer.get_vocab()
    )
    with pytest.raises(UsageError, match=r"trained --data\.vocab_size 330: .* was trained with .*vocab_size 320, and"):
        prepared(tmp_path, **resume, vocab_size=330)
    tiny.tokenizer().save_pretrained(tmp_path / "named")
    with pytest.raises(UsageError, match="its weights only know the ids of that tokenizer"):
        prepared(tmp_path, **resume, tokenizer=str(tmp_path / "named"))
