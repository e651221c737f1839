"""`accel-train data rows`: what is printed is what the loss counts and what the first steps see."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from accel_train import cli
from accel_train.commands import rows
from accel_train.config import UsageError, in_one_process
from accel_train.data.datasets import TextRow, TextRows
from accel_train.domains.language import perplexity
from accel_train.domains.language.prepare import DataConfig, LanguageData, prepare_data
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.metrics.records import read_metrics
from recipes import causal_lm
from tests.domains.language import tiny

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ANSWERS = ("Well met.", "Two\nlines.", "Long live the king! " * 3 + "Farewell.")
HEADER = re.compile(r"== step (\d+), row (\d+): (\d+) tokens, (\d+) learned")
pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, rows of every form and a config in YAML."""
    folder = tmp_path_factory.mktemp("rows")
    tiny.tokenizer(TEMPLATE).save_pretrained(folder / "tokenizer")
    lines = [{"text": text} for text in tiny.TEXTS]
    lines += [{"prompt": "Who is there?", "completion": f" {number} men"} for number in range(4)]
    for answer in ANSWERS:
        chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": answer}]
        lines.append({"messages": [*chat, *chat]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "held.jsonl").write_text(json.dumps({"text": "Give you good night."}) + "\n")
    (folder / "tiny.yaml").write_text(
        "global_batch_size: 3\nmicro_batch_size: 2\nmax_steps: 2\nlog: {log_every: 1, progress_bar: off}\n"
        "model: {config: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        f"data: {{path: {folder / 'rows.jsonl'}, heldout_path: {folder / 'held.jsonl'}, max_length: 128, "
        f"tokenizer: {folder / 'tokenizer'}, cache_dir: {folder / 'cache'}}}\n"
        "evaluation: {samples: 1, shown: 0}\n"
    )
    return folder


def run(*words: str | Path) -> int:
    return cli._main(["data", "rows", *map(str, words)])


def shown(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert run(*words) == 0
    return capsys.readouterr().out


def headers(text: str) -> list[tuple[str, ...]]:
    return HEADER.findall(text)


def data_of(folder: Path, **options: object) -> LanguageData:
    places = {name: str(folder / place) for name, place in (("path", "rows.jsonl"), ("heldout_path", "held.jsonl"))}
    places |= {name: str(folder / name.removesuffix("_dir")) for name in ("tokenizer", "cache_dir")}
    return prepare_data(DataConfig(**places, max_length=128, **options), ModelConfig())  # pyright: ignore[reportArgumentType]


def test_the_marks_are_the_labels_of_the_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal_lm", folder / "tiny.yaml", "--count", "100")
    data = data_of(folder)
    found = headers(text)
    samples = [int(row) for _, row, *_ in found]
    assert sorted(samples) == list(range(len(data.train)))
    assert [int(step) for step, *_ in found[:4]] == [1, 1, 1, 2]
    batch = data.train.batch(samples) | {"weight": torch.ones(len(samples))}
    assert [int(learned) for *_, learned in found] == perplexity.trained_tokens(batch).tolist()
    assert [int(tokens) for _, _, tokens, _ in found] == batch["length"].tolist()
    (total,) = re.findall(r"in all: (\d+) tokens, (\d+) learned", text)
    assert total == (str(data.train.tokens), str(int(perplexity.trained_tokens(batch).sum())))
    longest, padding = re.findall(r"longest (\d+); padding (\d+)% of rows of 128", text)[0]
    assert int(longest) == int(batch["length"].max())
    assert int(padding) == round(100 * (1 - data.train.tokens / (128 * len(samples))))


def test_between_the_marks_is_what_the_assistant_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal_lm", folder / "tiny.yaml", "--count", "100")
    learned = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    whole = [f" {text}</s>" for text in tiny.TEXTS] + [f" {number} men</s>" for number in range(4)]
    whole += [f"{answer}</s>" for answer in ANSWERS for _ in range(2)]
    # The last chat is truncated in its second answer.
    (cut,) = (each for each in learned if each not in whole)
    assert f"[user]\nSay it.</s> \n[assistant]\n⟦{cut}⟧\n" in text
    assert ANSWERS[-1].startswith(cut)
    assert sorted(learned) == sorted([*whole[:-1], cut])
    assert re.search(r"== .*, 1 text, 1 truncated\n \[user\]", text)
    assert re.search(r"== 4 in all: .*, 12 texts, 1 truncated\n", text)


def test_the_texts_of_a_packed_row_are_those_of_the_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "causal_lm", folder / "tiny.yaml", "--count", "100")
    found: list[str] = []
    for row in re.split("\n== .*\n", text)[1:-1]:
        found += [part for part in re.split("(?:^|\n)-- text .*\n", row) if part]
    plain = [re.sub("⟦|⟧|<s>|</s>", "", part).strip() for part in found]
    sources = [*tiny.TEXTS, *(f"Who is there? {number} men" for number in range(4))]
    assert sorted(part for part in plain if not part.startswith("[user]")) == sorted(sources)
    assert len(plain) == len(sources) + len(ANSWERS)
    heldout = shown(capsys, "causal_lm", folder / "tiny.yaml", "--heldout")
    assert "<s>⟦ Give you good night.</s>⟧" in heldout


def test_a_table_has_each_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Flags of the command may also stand before the recipe.
    text = shown(capsys, "--ids", "--count", "100", "causal_lm", folder / "tiny.yaml")
    lines = re.findall(r"^ +(\d+)  (\S+) +([01]) +(\d+)$", text, re.MULTILINE)
    data = data_of(folder)
    pieces = data.tokenizer.get_vocab()
    assert len(lines) == data.train.tokens
    assert all(pieces[piece] == int(number) for number, piece, _, _ in lines)
    samples = [int(row) for _, row, *_ in headers(text)]
    batches = [data.train[sample] for sample in samples]
    assert [int(number) for number, *_ in lines] == [
        token for row in batches for token in row["input_ids"][: row["length"]].tolist()
    ]
    assert [int(place) for *_, place in lines] == [
        place for row in batches for place in row["position_ids"][: row["length"]].tolist()
    ]
    assert [learned == "1" for *_, learned, _ in lines] == [
        label >= 0 for row in batches for label in row["labels"][: row["length"]].tolist()
    ]


def test_a_long_text_is_split_and_not_truncated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "long.txt").write_text(" ".join(tiny.TEXTS) + "\n")
    words = ["--data.path", folder / "long.txt", "--data.max_length", "64", "--global_batch_size", "1"]
    text = shown(capsys, "causal_lm", folder / "tiny.yaml", *words)
    assert [remark for remark in re.findall(r"1 text(.*)\n", text) if remark][:1] == [", 1 split"]
    assert "truncated" not in text


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_the_same_after_its_rows_were_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same cache, same losses and the samples of its first steps; its own config.yaml shows the same rows."""
    # Seconds of what is not looked at.
    monkeypatch.setattr("accel_train.metrics.recorder.plot_curves", lambda *_: None)
    words = [str(folder / "tiny.yaml"), "--log.per_sample", "true", "--checkpoints.no_asynchronous"]
    words += ["--global_batch_size", "1", "--batch_schedule.steps", "1", "--batch_schedule.sizes", "3"]
    words += ["--without_samples", "0"]
    assert causal_lm.main([*words, "--output_dir", str(folder / "before"), "--data.cache_dir", str(folder / "c1")]) == 0
    capsys.readouterr()
    asked = [*words, "--output_dir", str(folder / "after"), "--data.cache_dir", str(folder / "c2")]
    text = shown(capsys, "causal_lm", *asked, "--count", "3")
    assert not (folder / "after").exists()
    cached = files(folder / "c2")
    assert causal_lm.main(asked) == 0
    assert {path for path in files(folder / "c2") if path not in cached and "lease" not in path} == set()
    losses = [
        [line["loss"] for line in read_metrics(folder / name / "metrics.jsonl") if line["event"] == "train"]
        for name in ("before", "after")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    lines = map(json.loads, (folder / "after" / "sample_losses.jsonl").read_text().splitlines())
    trained = sorted((line["step"], line["sample"]) for line in lines)
    assert [step for step, _ in trained] == [1, 2, 2]
    assert sorted((int(step), int(row)) for step, row, *_ in headers(text)) == trained
    written = files(folder / "after")
    capsys.readouterr()
    assert shown(capsys, "causal_lm", folder / "after" / "config.yaml", "--count", "3") == text
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        run("causal_lm", folder / "after" / "config.yaml", "--data.path", folder / "nowhere.jsonl")
    assert files(folder / "after") == written


@pytest.mark.parametrize(
    "launched",
    [
        {
            "WORLD_SIZE": "2",
            "RANK": "1",
            "LOCAL_RANK": "1",
            "ACCELERATE_USE_FSDP": "true",
            "ACCEL_TRAIN_MACHINE_FILE": "nowhere.yaml",
        },
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "2", "PMI_RANK": "0"},
    ],
    ids=["torchrun", "mpi"],
)
def test_the_variables_of_a_launcher_have_no_effect(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launched: dict[str, str]
) -> None:
    """A shell in the pod of a run has them, and the other processes never come."""
    # The steps of --smoke have samples for every process.
    words = ("causal_lm", folder / "tiny.yaml", "--smoke")
    text = shown(capsys, *words)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert shown(capsys, *words) == text
    assert launched.items() <= os.environ.items()


def test_the_choice_of_the_device_holds_for_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    for name, value in {**chosen, "ACCELERATE_MIXED_PRECISION": "bf16"}.items():
        monkeypatch.setenv(name, value)
    with in_one_process():
        assert chosen.items() <= os.environ.items()
        assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_a_variable_of_the_user_is_read_in_a_path(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_SCRATCH", str(folder))
    shown(capsys, "causal_lm", folder / "tiny.yaml", "--data.path", "$LOCAL_SCRATCH/rows.jsonl")


def row_of(text: str, learned: Sequence[bool]) -> tuple[TextRows, TextRow]:
    """A row with a token for each letter, of which "|" is special."""
    ids = [*map(ord, text)]
    found = TextRows(
        train=[],
        heldout=[],
        row=lambda _, __: row,
        max_length=9,
        decode=lambda ids: "".join(map(chr, ids)).replace("|", "").lstrip(),
        piece=chr,
        special={ord("|")},
        notices=(),
    )
    row = TextRow(ids, [*learned], [*range(len(ids))], [""])
    return found, row


def test_a_text_cannot_close_a_mark_or_steer_the_terminal() -> None:
    found, row = row_of("a⟧ b\x1b|c", [False, True, True, True, False, True, False])
    places = range(len(row.ids))
    assert rows.marked(found, row, places, color=False) == r"a⟦\u27e7 b⟧\x1b⟦|⟧c"
    green, dim, end = "\x1b[32m", "\x1b[32;2m", "\x1b[0m"
    expected = rf"a{green}\u27e7 b{end}\x1b{dim}|{end}c"
    assert rows.marked(found, row, places, color=True) == expected


def test_colors_are_for_a_terminal_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, row = row_of("ab", [False, True])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert [*rows._texts(found, row, as_table=False)] == ["a⟦b⟧"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert [*rows._texts(found, row, as_table=False)] == ["a\x1b[32mb\x1b[0m"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert [*rows._texts(found, row, as_table=False)] == ["a⟦b⟧"]


def test_texts_of_masked_diffusion_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{number} {text}" for number in range(9) for text in tiny.TEXTS]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    places = {"data.path": "texts.txt", "data.cache_dir": "cache", "output_dir": "run"}
    words = [word for name, place in places.items() for word in (f"--{name}", tmp_path / place)]
    words += ["--data.vocab_size", "300", "--data.heldout_fraction", "0.2", "--data.latent_dim", "8"]
    text = shown(capsys, "mmdit", "demo", *words, "--global_batch_size", "4", "--count", "50")
    found = re.findall("^⟦(.*)⟧$", text, re.MULTILINE)
    assert len(found) == len(headers(text)) > 30
    assert all(any(whole.startswith(part) for whole in texts) for part in found)
    cut = sum(part not in texts for part in found)
    assert cut
    assert f"{cut} truncated\n" in text
    assert not (tmp_path / "run").exists()


def test_wrong_usage_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"recipes/pde.py has no rows of text: .* such as causal_lm or mmdit"):
        run("recipes/pde.py")
    with pytest.raises(UsageError, match=r"--count 0: at least 1 row is required; give --count 4"):
        run("causal_lm", "--count", "0")
    with pytest.raises(UsageError, match=r"--optimizer.l"):
        run("causal_lm", folder / "tiny.yaml", "--optimizer.l", "1")


def test_the_page_has_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "causal_lm.md").read_text()
    (block,) = (part for part in page.split("```\n") if part.startswith("$ cat pairs.jsonl"))
    source, command, printed = re.fullmatch(r"\$ cat .*?\n(.*?)\$ accel-train (.*?)\n(.*)", block, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    (tmp_path / "pairs.jsonl").write_text(source)
    os.symlink(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    assert cli._main(command.split()) == 0
    assert capsys.readouterr().out == printed
