import json
import os
import random
import re
import socket
import string
from pathlib import Path

import datasets
import pytest

from accel_train.config import UsageError
from accel_train.data.tables.sides import CONTENT_FIELD
from accel_train.data.tables.text_sources import ASCII_SIGNS, _signs, content_key, split_key
from accel_train.domains.text import corpus
from accel_train.domains.text.corpus import Corpus, read_corpus, remove_heldout, split_heldout


def read(path: Path | str, **options: object) -> Corpus:
    defaults: dict[str, object] = {"split": "train", "text_column": "text", "max_bad_rows": 0}
    return read_corpus(str(path), **{**defaults, **options})  # type: ignore[arg-type]


def jsonl(file: Path, *rows: object) -> Path:
    file.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_demo_is_what_its_origin_file_says() -> None:
    raw = corpus.DEMO_FILE.read_bytes()
    lines = raw.decode("ascii").splitlines()
    assert len(raw) <= 2_000_000
    assert len(lines) >= 24_000
    assert all(5 <= len(line.split()) <= 16 for line in lines)
    assert len({content_key(line) for line in lines}) == len(lines)
    origin = (corpus.DEMO_FILE.parent / "ORIGIN.md").read_text()
    assert f"{len(lines):,} passages of 5 to 16 words" in origin
    assert "public domain" in origin
    assert not re.search(r"Gutenberg|Exeunt|\[|\]", raw.decode())
    assert read("demo").texts == lines


def test_text_file_with_mark_crlf_blank_lines_and_unicode_separators(tmp_path: Path) -> None:
    file = tmp_path / "with space and ü.txt"
    file.write_bytes("\ufefffirst line\r\n\r\n  second\u2028still second \r\nthird".encode())
    assert read(file).texts == ["first line", "second\u2028still second", "third"]


def test_folder_of_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("third\n")
    jsonl(tmp_path / "a.jsonl", {"text": "first"}, "", {"text": "second", "other": 1})
    (tmp_path / "ignored.md").write_text("no")
    assert read(tmp_path).texts == ["first", "second", "third"]
    assert read(f"{tmp_path}/").texts == ["first", "second", "third"]


def test_home_variable_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "data.jsonl", {"text": "here"})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/data.jsonl", "$WHERE/data.jsonl", "data.jsonl", "./data.jsonl"):
        assert read(path).texts == ["here"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "unfinished', "not JSON"),
        ('{"text": "first", "text": "second"}', "the key 'text' is given twice, so it is unclear which value is meant"),
        ('{"text": "x", "meta": {"n": 1, "n": 1}}', "the key 'n' is given twice"),
        ("[1, 2]", "a JSON list, not an object"),
        ('"text"', "a JSON str, not an object"),
        ('{"caption": "x"}', r"no field 'text' among \['caption'\]; set --data.text_column caption"),
        ('{"text": null}', "'text' is NoneType, text is required"),
        ('{"text": 7}', "'text' is int, text is required"),
        ('{"text": " \\n "}', "'text' is empty"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": ' + "[" * 100_000, "not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, row: str, reason: str) -> None:
    file = jsonl(tmp_path / "data.jsonl", {"text": "good"}, row, {"text": "good too"}, row)
    with pytest.raises(UsageError, match=rf"data\.jsonl:2: .*{reason}.*--data.max_bad_rows \(now 0\)"):
        read(file)
    with pytest.raises(UsageError, match=r"data\.jsonl:4: .*\(1 bad rows before it were left out\)"):
        read(file, max_bad_rows=1)
    found = read(file, max_bad_rows=2)
    assert (found.texts, found.skipped) == (["good", "good too"], 2)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"good\nna\xefve\nalso good\n")
    with pytest.raises(UsageError, match=r"latin\.txt:2: byte 3 of the line is not UTF-8"):
        read(file)
    assert read(file, max_bad_rows=1).texts == ["good", "also good"]


@pytest.mark.parametrize(("start", "code"), [(b"\xff\xfeh\x00", "UTF-16"), (b"\x1f\x8b\x08", "gzip-compressed")])
def test_other_codings_are_refused_by_name(tmp_path: Path, start: bytes, code: str) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes(start)
    with pytest.raises(UsageError, match=f"is {code}, but UTF-8 is required"):
        read(file)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "script.py").write_text("raise SystemExit")
    (tmp_path / "weights.pkl").write_bytes(b"")
    (tmp_path / "nothing.txt").write_text("\n \n")
    for name in ("pipe.jsonl", "pipe.parquet"):
        os.mkfifo(tmp_path / name)
    for path, message in {
        "pipe.jsonl": "is a named pipe",
        "pipe.parquet": "is a named pipe",
        "missing.jsonl": "does not exist",
        "loop.txt": "loop of symbolic links",
        "empty": "is not a source of text",
        "script.py": "dataset script: code from a dataset is never run",
        "weights.pkl": "is not a source of text",
        "nothing.txt": f"contains no usable text on {socket.gethostname()}",
        "a\0b.txt": "does not exist",
        "n" * 5000: "does not exist",
    }.items():
        with pytest.raises(UsageError, match=message):
            read(tmp_path / path)


def test_saved_datasets_and_tables(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2], "caption": ["one", " two "]})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "splits"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.csv").write_text("id,caption\n1,one\n2,two\n")
    for name in ("plain", "splits", "rows.parquet", "rows.csv"):
        assert read(tmp_path / name, text_column="caption").texts == ["one", "two"]
    assert read(tmp_path / "rows.csv", text_column="id").texts == ["1", "2"]
    assert read(tmp_path / "splits", text_column="caption", split="test").texts == ["two"]
    with pytest.raises(UsageError, match=r"--data.split 'dev'.*\['test', 'train'\]"):
        read(tmp_path / "splits", text_column="caption", split="dev")
    with pytest.raises(UsageError, match=r"--data.text_column 'captions' is not a column.*did you mean 'caption'"):
        read(tmp_path / "plain", text_column="captions")


def test_bad_samples_of_a_dataset_are_named_by_index(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["one", None, "three", ""]}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match=r"sample 1 of .*'text' is NoneType"):
        read(tmp_path / "d")
    assert read(tmp_path / "d", max_bad_rows=2).texts == ["one", "three"]
    (tmp_path / "d" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="cannot be read as a saved dataset"):
        read(tmp_path / "d")
    (tmp_path / "d.parquet").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"d\.parquet' cannot be read \(Arrow"):
        read(tmp_path / "d.parquet")


def test_streams_are_refused() -> None:
    stream = datasets.Dataset.from_dict({"text": ["one"]}).to_iterable_dataset()
    with pytest.raises(UsageError, match=r"'my/data' is a stream \(IterableDataset\).*JSONL"):
        corpus.dataset_rows(stream, "my/data", "text")


def test_a_hub_id_may_name_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def hub(*names: object, **options: object) -> datasets.Dataset:
        asked.append((*names, options))
        return datasets.Dataset.from_dict({"text": ["one"]})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert read("owner/name:small-v1", split="test").texts == ["one"]
    assert read("name").texts == ["one"]
    assert asked == [
        ("owner/name", "small-v1", {"split": "test", "revision": None, "keep_in_memory": False}),
        ("name", None, {"split": "train", "revision": None, "keep_in_memory": False}),
    ]


def test_options_that_a_source_would_ignore_are_refused(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", {"text": "x"})
    datasets.Dataset.from_dict({"caption": ["one"]}).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"caption": ["one"]})}).save_to_disk(tmp_path / "splits")
    files = (str(tmp_path / "rows.jsonl"), "test", "caption")
    for path, split, column in (("demo", "test", "text"), files, (str(tmp_path / "saved"), "test", "caption")):
        with pytest.raises(UsageError, match=r"--data.split 'test' has no effect"):
            corpus.check_options_have_effect(path, split, column)
    for path in ("demo", "some.txt"):
        with pytest.raises(UsageError, match=r"--data.text_column 'caption' has no effect"):
            corpus.check_options_have_effect(path, "train", "caption")
    corpus.check_options_have_effect(str(tmp_path / "saved"), "train", "caption")
    for path in ("owner/name", str(tmp_path / "splits")):
        corpus.check_options_have_effect(path, "test", "caption")


def test_files_of_a_run_in_a_folder_of_texts_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    for name in ("run.json", "config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text('{"event": "start"}\n')
    assert read(tmp_path).texts == ["one"]
    assert "metrics.jsonl" in corpus.left_out_notices(str(tmp_path))[0]


def test_a_column_of_a_folder_of_text_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(UsageError, match=r"--data.text_column 'body' has no effect with .*, whose lines are the texts"):
        corpus.check_options_have_effect(str(tmp_path), "train", "body")
    held_out = jsonl(tmp_path / "other" / "h.jsonl", {"body": "three"})
    corpus.check_options_have_effect(str(tmp_path), "train", "body", str(held_out))
    jsonl(tmp_path / "b.jsonl", {"body": "two"})
    corpus.check_options_have_effect(str(tmp_path), "train", "body")


@pytest.mark.usefixtures("no_network")
def test_an_unreachable_hub_id_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"'nobody/nothing'.*the hub answered .*without a network"):
        read("nobody/nothing")
    with pytest.raises(UsageError, match=r"'no such thing/at all!': .* does not exist"):
        read("no such thing/at all!")


def test_a_script_in_a_dataset_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    with pytest.raises(UsageError):
        read("evil")
    with pytest.raises(UsageError):
        read("evil/evil.py")
    assert not (tmp_path / "canary").exists()


def test_held_out_by_content_alone() -> None:
    texts = [f"word{i} and another" for i in range(5000)]
    train, heldout = split_heldout(Corpus(texts), 0.04)
    assert sorted(train + heldout) == list(range(5000))
    assert 150 < len(heldout) < 250  # binomial(5000, 0.04): 200 +- 14
    side = {texts[i]: i in set(heldout) for i in range(5000)}
    grown = [f"new{i}" for i in range(100)] + texts[::-1]
    for i in split_heldout(Corpus(grown), 0.04)[1]:
        assert side.get(grown[i], True)
    wider = split_heldout(Corpus(texts), 0.1)[1]
    assert set(heldout) < set(wider)


def test_equal_texts_stand_on_one_side_once() -> None:
    texts = ["To be, or not to be", "to be -- or not to be!", "else", "To be, or not to be", "?!", "..."]
    train, heldout = split_heldout(Corpus(texts), 0.5)
    assert sorted(train + heldout) == [0, 2, 4, 5]
    with_latents = Corpus(texts, [(0, i) for i in range(6)])
    train, heldout = split_heldout(with_latents, 0.5)
    assert sorted(train + heldout) == list(range(6))
    assert any({0, 1, 3} <= set(side) for side in (train, heldout))


@pytest.mark.parametrize(
    "texts",
    [
        ["सीता घर जाता है", "सीता घर जाती है", "सीता घर जाते हैं"],
        ["what a day 😀", "what a day 😡", "What a day, 😀!"],
        ["I write C", "I write C++", "I write C#", "I write: C."],
        ["5 > 3", "5 < 3"],
        ["-5 degrees", "5 degrees"],
        ["a != b", "a = b"],
        ["x - 1", "x 1"],
        ["if (!done)", "if (done)"],
        ["café", "cafe", "cafe\u0301"],
    ],
    ids=["marks", "emoji", "code", "formulas", "negative", "unequal", "minus", "not", "accents"],
)
def test_texts_that_differ_in_marks_or_signs_are_kept_on_one_side(texts: list[str], tmp_path: Path) -> None:
    repeats = 1 if len(texts) > 3 or "😀" in texts[0] or "é" in texts[0] else 0
    train, heldout = split_heldout(Corpus(texts), 0.5)
    kept = sorted(train + heldout)
    assert kept == list(range(len(texts) - repeats))
    if "é" not in texts[0]:  # words with another letter are other words
        assert not train or not heldout


def test_ascii_texts_have_the_keys_that_all_others_have() -> None:
    """They are hashed by a rule of their own, which is faster."""
    generator = random.Random(0)
    for _ in range(2000):
        text = "".join(generator.choices(string.printable, k=20))
        assert ASCII_SIGNS.findall(text) == _signs().findall(text)


def test_a_table_with_other_separators_is_named(tmp_path: Path) -> None:
    (tmp_path / "semi.csv").write_text("id;text\n1;a b c\n")
    with pytest.raises(UsageError, match=r"columns must be separated by commas, not ';'"):
        read_corpus(str(tmp_path / "semi.csv"), split="train", text_column="text", max_bad_rows=0)


def test_texts_of_one_latent_stand_on_one_side() -> None:
    texts = [f"{start} number {index}" for index in range(500) for start in ("this is", "here is", "see")]
    corpus = Corpus(texts, [(0, index // 3) for index in range(1500)])
    train, heldout = split_heldout(corpus, 0.2)
    assert not {index // 3 for index in train} & {index // 3 for index in heldout}
    assert 70 < len({index // 3 for index in heldout}) < 130  # binomial(500, 0.2): 100 +- 9
    # Joined by a text of another latent, in either direction.
    joined = Corpus(["a", "b", "B!", "c", "d"], [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2)])
    for fraction in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert any({0, 1, 2, 3} <= set(side) for side in split_heldout(joined, fraction))
    kept, _ = remove_heldout(corpus, Corpus(["other words"], [(0, 7)]))
    assert sorted({*range(1500)} - {*kept}) == [21, 22, 23]


def test_rows_that_name_no_file_are_not_of_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"text {index}", "shard": 0, "idx": index, CONTENT_FIELD: None} for index in range(100)]
    file.write_text("\n".join(map(json.dumps, rows)))
    corpus = read_corpus(str(file), split="train", text_column="text", max_bad_rows=0, with_references=True)
    assert corpus.contents == []
    train, heldout = split_heldout(corpus, 0.3)
    assert len(train) > 50
    assert len(heldout) > 10


def test_held_out_source_of_its_own_is_taken_out_of_training() -> None:
    train, heldout = Corpus(["a b", "c d", "e f", "A, B!"]), Corpus(["C d.", "x y", "x y"])
    kept, apart = remove_heldout(train, heldout)
    assert [train.texts[i] for i in kept] == ["a b", "e f"]
    assert sorted(heldout.texts[i] for i in apart) == ["C d.", "x y"]


def test_the_first_held_out_texts_are_from_everywhere() -> None:
    heldout = split_heldout(Corpus([f"text {i}" for i in range(10_000)]), 0.1)[1]
    assert abs(sum(heldout[:200]) / 200 - 5000) < 700  # three standard errors of a uniform mean


def test_any_number_of_first_held_out_rows_is_a_fair_sample_of_repeated_captions() -> None:
    captions = ["red", "green", "blue", "yellow"]
    texts = [captions[index // 10] for index in range(40)]
    corpus = Corpus(texts, [(0, index) for index in range(40)], contents=[f"{index}" for index in range(40)])
    sides = [split_heldout(corpus, 1.0)[1], remove_heldout(Corpus(["x"], [(0, 0)], contents=["x"]), corpus)[1]]
    for heldout in sides:
        order = [texts[index] for index in heldout]
        assert sorted(order[:4]) == sorted(captions)
        assert order == order[:4] * 10
        assert sorted(heldout) == list(range(40))
        # Rows of one caption are in their own order.
        assert [index for index in heldout if texts[index] == "red"] == list(range(10))


def test_held_out_texts_that_differ_are_in_the_order_of_their_hashes() -> None:
    texts = ["a b", "A, B!", "c d", "e f", "C d", "g h"]
    corpus = Corpus(texts, [(0, index) for index in range(6)])
    by_hash = sorted(range(6), key=lambda index: (split_key(texts[index]), index))
    assert split_heldout(corpus, 1.0)[1] == by_hash
    assert remove_heldout(Corpus(["x"], [(1, 0)]), corpus)[1] == by_hash


def test_a_folder_of_pictures_names_their_options(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "below").mkdir(parents=True)
    (tmp_path / "pictures" / "below" / "a.PNG").write_bytes(b"")
    with pytest.raises(UsageError, match=r"contains pictures, but texts .* --pictures\.latents pixels, .* image_demo"):
        read(tmp_path / "pictures")
    captioned = tmp_path / "captioned"
    captioned.mkdir()
    (captioned / "metadata.jsonl").write_text('{"text": "a red flag", "file_name": "a.png"}')
    (captioned / "report").mkdir()
    (captioned / "report" / "curves.png").write_bytes(b"")
    assert not [line for line in corpus.left_out_notices(str(captioned)) if "pictures" in line]
    (captioned / "a.png").write_bytes(b"")
    *_, line = corpus.left_out_notices(str(captioned))
    assert re.search(r"only its texts are learned.*--pictures\.latents pixels, .* image_demo", line)
