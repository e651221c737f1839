"""Bad input to the real recipe, row by row: the error a person reads, its exit code, and that no model was built.

Ids are the rows of the bad-input matrix. Most rows call the recipe's ``main`` in this process; the last tests start
real launchers, where a silent fallback would happen. Rows of launch files alone are in test_machine_config.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from accel_train import cli, experiment
from accel_train.checkpoints import opening
from accel_train.checkpoints import run as runs
from accel_train.config import UsageError
from accel_train.metrics import logs
from accel_train.runtime import accelerator as machine
from accel_train.store import commit
from recipes import mmdit as recipe
from tests.store.test_commit import make
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "mmdit.py"
PRESETS = ROOT / "accelerate_configs"


class ModelReachedError(Exception):
    """The recipe went as far as building its model: nothing was refused."""


@dataclass(frozen=True)
class Row:
    """What is given, and what must come of it."""

    id: str
    argv: str = ""
    """Words of the command line; {} is the test's own directory."""
    says: str = ""
    """Regular expression of the message, of everything printed where the row is accepted."""
    code: int | None = 2
    """Exit code; None: accepted, the model is reached."""
    prepare: Callable[[Path], object] | None = None
    """Makes the files of the row in the test's own directory."""
    environment: tuple[tuple[str, str], ...] = ()


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def jsonl(*rows: object) -> Callable[[Path], object]:
    return write("bad.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def texts(count: int, start: int = 0) -> str:
    words = "the old king rode north with seven grey horses and a small bright lantern under rain".split()
    lines = (" ".join(words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(6)) for i in range(start, count))
    return "".join(json.dumps({"text": f"{line} {i}"}) + "\n" for i, line in enumerate(lines, start))


def refused_start(folder: Path) -> None:
    """A directory in which a start of the experiment of ``BASE`` ended before it trained."""
    with pytest.raises(ModelReachedError):
        recipe.main(words("", folder))
    reset()


def used_run(folder: Path) -> None:
    """A directory in which the experiment of ``BASE`` was trained before."""
    with pytest.raises(ModelReachedError):
        recipe.main(words("", folder))
    OPENED[-1].note_training()
    reset()


def unfinished(here: Path) -> None:
    """A save that somebody names."""
    (here / ".tmp-checkpoint_00000010-host-1-abc").mkdir()


def with_torn_checkpoint(folder: Path) -> None:
    used_run(folder)
    (folder / "run" / "checkpoints" / "checkpoint_00000010").mkdir()


def with_temporary_checkpoint(folder: Path) -> None:
    used_run(folder)
    (folder / "run" / "checkpoints" / ".tmp-00000010-0123abcd").mkdir()


def damaged_checkpoint(folder: Path) -> None:
    """The only checkpoint of another run, with other weights than were written."""
    path = make(folder / "other" / "checkpoints", 10)
    (path / "model.safetensors").write_bytes(b"weightz")


def then(*steps: Callable[[Path], object]) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        for step in steps:
            step(folder)

    return run


def link_loop(folder: Path) -> None:
    (folder / "a.yaml").symlink_to(folder / "b.yaml")
    (folder / "b.yaml").symlink_to(folder / "a.yaml")


def saved_dataset(folder: Path) -> None:
    import datasets

    rows = {"text": ["one two three", None, "four five six"], "n": [1, 2, 3]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "saved"))


def parquet_shards(folder: Path, *columns: dict[str, list[object]]) -> Path:
    """A folder of three shards of good rows, and one more for each of ``columns``."""
    import pyarrow as pa
    from pyarrow import parquet

    lines = [json.loads(line) for line in texts(60).splitlines()]
    (folder / "shards").mkdir()
    for number in range(3):
        table = pa.table({"text": [row["text"] for row in lines[number::3]]})
        parquet.write_table(table, folder / "shards" / f"{number}.parquet", row_group_size=8)
    for number, more in enumerate(columns, 3):
        parquet.write_table(pa.table(more), folder / "shards" / f"{number}.parquet")
    return folder / "shards"


def damaged_row_group(folder: Path) -> None:
    from pyarrow import parquet

    file = parquet_shards(folder) / "1.parquet"
    column = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    content = bytearray(file.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    for place in range(start + 20, start + column.total_compressed_size):
        content[place] ^= 0xFF
    file.write_bytes(bytes(content))


def removed_shard(folder: Path) -> None:
    """A run that was trained on three shards, of which one is gone."""
    shards = parquet_shards(folder)
    with pytest.raises(ModelReachedError):
        recipe.main(words(SHARDS, folder))
    OPENED[-1].note_training()
    reset()
    (shards / "1.parquet").unlink()


SHARDS = "--data.path {}/shards --data.read shards"
BASE = (
    "demo --data.path {}/texts.jsonl --data.vocab_size 300 --data.latent_dim 4 --output_dir {}/run "
    "--data.heldout_fraction 0.2 --global_batch_size 8 --micro_batch_size 8 --max_steps 40"
)
CONFIG = "data: {path: texts.jsonl, vocab_size: 300, latent_dim: 4, heldout_fraction: 0.2}\nmax_steps: 40\n"
CONFIG += "global_batch_size: 8\nmicro_batch_size: 8\noutput_dir: run\n"

FLAGS = [
    Row("I24-flag", "--optmizer.lr 1e-3", r"--optmizer\.lr: unknown option \(did you mean '--optimizer\.lr'\?"),
    Row("I24-preset", "dmeo", r"preset 'dmeo' does not exist \(did you mean 'demo'\?.*presets are base, demo"),
    Row(
        "I24-yaml",
        "{}/c.yaml",
        r"c\.yaml:1:1: unknown option 'max_step': 5.*'max_steps'",
        prepare=write("c.yaml", "max_step: 5"),
    ),
    Row(
        "I24-yaml-nested",
        "{}/c.yaml",
        r"unknown option 'optimizer\.learning_rate': 1e-06; use --optimizer\.lr",
        prepare=write("c.yaml", "optimizer: {learning_rate: 1e-6}"),
    ),
    Row("I25", "--a.b.c 1", r"--a\.b\.c: unknown option"),
    Row("I25-nearest", "--optimiser.lr 1", r"did you mean '--optimizer\.lr'\?"),
    Row("I25-namesakes", "--lr 1", r"did you mean '--optimizer\.lr' or '--balance\.lr'\?"),
    Row(
        "I25-yaml",
        "{}/c.yaml",
        r"unknown option 'optimiser\.lr': 1.*'optimizer\.lr'",
        prepare=write("c.yaml", "optimiser: {lr: 1}"),
    ),
    Row(
        "I25-leaf-in-no-group",
        "{}/c.yaml",
        r"unknown option 'keep_last'.*'checkpoints\.keep_last'",
        prepare=write("c.yaml", "keep_last: 3"),
    ),
    Row("I25-value-for-group", "{}/c.yaml", r"optimizer: 3 must be a mapping", prepare=write("c.yaml", "optimizer: 3")),
    Row(
        "I26-lr",
        "--optimizer.lr fast",
        r"optimizer\.lr: 'fast' is refused: a number is required; correct --",
    ),
    Row("I26-steps", "--max_steps 1.5", r"max_steps: 1\.5 is refused: an integer"),
    Row("I26-choice", "--precision bf32", r"precision: 'bf32' is refused: 'fp32' or 'bf16' or 'fp16' is required"),
    Row(
        "I26-yaml",
        "{}/c.yaml",
        r"c\.yaml:1:13: optimizer\.lr: 'fast' is refused: a number is required",
        prepare=write("c.yaml", "optimizer: {lr: fast}"),
    ),
    Row(
        "I26-yaml-steps",
        "{}/c.yaml",
        r"c\.yaml:1:1: max_steps: 1\.5 is refused: an integer",
        prepare=write("c.yaml", "max_steps: 1.5"),
    ),
    Row("I26-yaml-bool", "{}/c.yaml", r"max_steps: true is refused", prepare=write("c.yaml", "max_steps: true")),
    Row(
        "I27",
        "{}/c.yaml --print_config",
        r"optimizer\.lr: 0\.0001",
        0,
        write("c.yaml", f"{CONFIG}optimizer: {{lr: 1e-4}}"),
    ),
    Row("I28-zero", "--optimizer.lr 0", r"optimizer\.lr: 0 is refused: .*greater than 0.*--optimizer\.lr"),
    Row("I28-negative", "--optimizer.lr=-1e-3", r"optimizer\.lr: -0\.001 is refused: .*greater than 0"),
    Row("I28-nan", "--optimizer.lr nan", r"optimizer\.lr: 'nan' is refused: a number"),
    Row("I28-inf", "--optimizer.lr inf", r"optimizer\.lr: 'inf' is refused: a number"),
    Row(
        "I28-yaml-nan", "{}/c.yaml", r"optimizer\.lr: nan is refused", prepare=write("c.yaml", "optimizer: {lr: .nan}")
    ),
    Row(
        "I28-betas",
        "--optimizer.betas 0.9 1.0",
        r"optimizer\.betas\.1: 1\.0 is refused: .*less than 1.*--optimizer\.betas$",
    ),
    Row("I28-warmup", "--schedule.warmup_steps 41", r"warmup_steps: 41.*40"),
    Row(
        "I28-warmup-of-the-file",
        "{}/c.yaml",
        r"warmup_steps: 41: must not be more than max_steps: 40",
        prepare=write("c.yaml", f"{CONFIG}schedule: {{warmup_steps: 41}}\n"),
    ),
    Row("I28-short", "--max_steps 15", r"warmup_steps: 20 .* the 15 steps .* shortened to 1; .*fresh start", None),
    Row(
        "I28-timeout",
        "--collective_timeout_seconds 100000000000000",
        r"collective_timeout_seconds: 100000000000000 is refused: .*less than or equal to 31536000",
    ),
    Row("I28-floor", "--schedule.floor 2", r"schedule\.floor: 2 is refused: .*less than or equal to 1"),
    Row("I28-steps-twice", "--max_epochs 2", r"max_steps: 40, max_epochs: 2\.0: give exactly one of them"),
    Row(
        "I28-epochs-of-steps",
        "{}/c.yaml --max_epochs 2",
        r"max_steps: 40 of \S+c\.yaml gives way to --max_epochs 2\.0",
        None,
        prepare=write("c.yaml", CONFIG),
    ),
    Row(
        "I28-steps-of-epochs",
        "{}/c.yaml --max_steps 6",
        r"max_epochs: 2\.0 of \S+c\.yaml gives way to --max_steps 6.*warmup_steps: 20 .* the 6 steps .* shortened to 0",
        None,
        prepare=write("c.yaml", CONFIG.replace("max_steps: 40", "max_epochs: 2") + "schedule: {warmup_steps: 20}\n"),
    ),
    Row(
        "I28-short-cycle",
        "{}/c.yaml --max_steps 30",
        r"schedule\.cycle_steps: 28 .* the 30 steps .* shortened to 27; .*--schedule\.cycle_steps",
        None,
        prepare=write("c.yaml", f"{CONFIG}schedule: {{kind: cosine_restarts, warmup_steps: 10, cycle_steps: 28}}\n"),
    ),
    Row(
        "I29", "--gradient_accumulation_steps 4", r"--global_batch_size and --micro_batch_size: accumulation is derived"
    ),
    Row("I29-dashes", "--gradient-accumulation-steps=4", r"--global_batch_size and --micro_batch_size"),
    Row(
        "I29-yaml",
        "{}/c.yaml",
        r"'gradient_accumulation_steps'.*--global_batch_size",
        prepare=write("c.yaml", "gradient_accumulation_steps: 4"),
    ),
    Row("I30", "--micro_batch_size 3", r"is uneven.*(--global_batch_size \d+ --micro_batch_size \d+.*){3}", None),
    Row(
        "I30-too-small",
        "--global_batch_size 1",
        r"global_batch_size: 1 is smaller than the 2 processes",
        environment=(("WORLD_SIZE", "2"),),
    ),
    Row("I31-keep-all", "--checkpoints.keep_last 0", "fresh start", None),
    Row("I31-keep-one", "--checkpoints.keep_last 1", "fresh start", None),
    Row(
        "I31-negative",
        "--checkpoints.keep_last=-1",
        r"checkpoints\.keep_last: -1 is refused: .*greater than or equal to 0",
    ),
    Row("I31-save-at-end", "--checkpoints.save_every 0", "fresh start", None),
    Row("I31-save-negative", "--checkpoints.save_every=-1", r"checkpoints\.save_every: -1 is refused"),
    Row("I39-unknown", "--log.trackers tensorbord", r"'tensorbord' is not a tracker \(did you mean 'tensorboard'\?"),
    Row("I39-not-installed", "--log.trackers comet_ml", r"'comet_ml' needs a package.*pip install"),
    Row("I39-memory-of-no-steps", "--profile.memory", r"profile\.memory: true: has no effect .*profile\.steps.*10:20"),
    Row(
        "I39-memory-on-a-cpu",
        "--profile.memory --profile.steps 1:2",
        r"profile\.memory: true: torch records the allocations of CUDA only, and this run is on cpu; leave it out",
    ),
    Row("I41-negative", "--seed=-1", r"seed: -1 is refused: .*greater than or equal to 0"),
    Row("I41-large", "--seed 4294967296", r"seed: 4294967296 is refused: .*less than 4294967296"),
    Row("I41-largest", "--seed 4294967295", "fresh start", None),
]

FILES = [
    Row(
        "I43-not-utf8",
        "{}/c.yaml",
        r"c\.yaml:1:\d+: byte 0xe9 is not UTF-8; save the file as UTF-8",
        prepare=write("c.yaml", b"output_dir: caf\xe9"),
    ),
    Row("I43-utf16", "{}/c.yaml", r"is not UTF-8", prepare=write("c.yaml", "max_steps: 5".encode("utf-16"))),
    Row("I43-bom", "{}/c.yaml", "fresh start", None, write("c.yaml", b"\xef\xbb\xbf" + CONFIG.encode())),
    Row("I43-crlf", "{}/c.yaml", "fresh start", None, write("c.yaml", CONFIG.replace("\n", "\r\n"))),
    Row("I43-huge", "{}/c.yaml", r"larger than 256 KiB", prepare=write("c.yaml", "#" * 10_000_000)),
    Row("I43-loop", "{}/a.yaml", r"no such file|too many levels", prepare=link_loop),
    Row("I43-empty", "{}/c.yaml", r"the file is empty", prepare=write("c.yaml", "")),
    Row("I43-list", "{}/c.yaml", r"the top is a list, not a mapping", prepare=write("c.yaml", "- max_steps")),
    Row(
        "I43-twice",
        "{}/c.yaml",
        r"c\.yaml:2:1: key `seed` is given twice, first at line 1",
        prepare=write("c.yaml", "seed: 1\nseed: 2"),
    ),
    Row(
        "I43-code", "{}/c.yaml", r"unsupported tag", prepare=write("c.yaml", "seed: !!python/object/apply:os.getpid []")
    ),
    Row("I43-no-file", "{}/none.yaml", r"there is no such file .*none\.yaml.*; give a preset or a YAML file"),
    Row(
        "I43-folder", "{}/c.yaml", r"c\.yaml': is a directory \(.*c\.yaml\)", prepare=lambda at: (at / "c.yaml").mkdir()
    ),
    Row(
        "I32-nul",
        "{}/c.yaml",
        r"c\.yaml:1:1: output_dir: 'a\\x00b' is refused: text without the character NUL is required; .*--output_dir",
        prepare=write("c.yaml", 'output_dir: "a\\0b"'),
    ),
    Row(
        "I32-no-utf-8",
        "--output_dir {}/bad\udcff",
        r"output_dir: '.* is refused: text in valid UTF-8 is required, and 'bad\\udcff' is not valid; correct",
    ),
    Row(
        "I32-long",
        "{}/c.yaml",
        r"c\.yaml:1:1: output_dir: 'n{40}'\.\.\. \(300 characters\) is refused: the path is too long .*255 bytes",
        prepare=write("c.yaml", f"output_dir: {'n' * 300}"),
    ),
    Row("I32-long-data", f"--data.path {'n' * 300}.txt", r"data\.path: 'n{40}'\.\.\. \(304 characters\) is refused"),
    Row("I32-long-init", f"--init_from {'n' * 300}", r"init_from: 'n{40}'\.\.\. \(300 characters\) is refused"),
    Row("I32-long-resume", f"--resume {'n' * 300}", r"resume: 'n{40}'\.\.\. \(300 characters\) is refused"),
    Row("I32-file", "--output_dir {}/texts.jsonl", r"output_dir.*texts\.jsonl.*give another --output_dir"),
    Row("I32-below-a-file", "--output_dir {}/texts.jsonl/run", r"output_dir.*give another --output_dir"),
]

RESUMING = [
    Row(
        "I33-lr",
        "--optimizer.lr 1e-3",
        r"different experiment: optimizer\.lr: 0\.0015 there, 0\.001 now.*--allow optimizer\.lr",
        prepare=used_run,
    ),
    Row("I33-seed", "--seed 1", r"seed: 0 there, 1 now", prepare=used_run),
    Row("I33-allowed", "--seed 1 --allow seed", "no checkpoint yet", None, used_run),
    Row("I33-another-allowed", "--seed 1 --allow precision", r"seed: 0 there, 1 now", prepare=used_run),
    Row("I33-machine-only", "--micro_batch_size 4 --max_steps 50", "no checkpoint yet", None, used_run),
    Row("I33-after-a-refusal", "--seed 1", "fresh start", None, refused_start),
    Row("I33-shorter-than-the-warm-up", "--max_steps 10", "no checkpoint yet", None, used_run),
    Row("I33-overwrite", "--seed 1 --overwrite", "fresh start", None, used_run),
    Row("I34-must", "--resume must", r"resume: must, but .*run contains no run; give the --output_dir"),
    Row("I34-must-no-checkpoint", "--resume must", r"has no checkpoint yet; train first", prepare=used_run),
    Row("I34-evaluate-only", "--evaluate_only", r"evaluate_only: .*run contains no run"),
    Row("I34-evaluate-initial", "--evaluate_only --resume never", r"fresh start in .*run", None),
    Row("I34-auto-says", "", r"fresh start in .*run", None),
    Row("I34-never-fresh", "--resume never", r"fresh start", None),
    Row("I34-never", "--resume never", r"resume: never, but .*run is already used; .*--overwrite", prepare=used_run),
    Row("I35-path", "--resume runs/other", r"resume: 'runs/other' is not auto, must or never, and .* does not exist"),
    Row("I35-resume-not-a-checkpoint", "--resume {}", r"resume: .*no manifest\.json.*it contains .*texts\.jsonl"),
    Row(
        "I35-resume-unfinished",
        "--resume {}/.tmp-checkpoint_00000010-host-1-abc",
        r"resume: .* is a save that was never finished; name a checkpoint_ directory",
        prepare=unfinished,
    ),
    Row("I35-hub", "--resume hub:not/a/name", r"hub:.*not/a/name|not/a/name.*org/name"),
    Row("I35-missing", "--init_from {}/none", r"init_from: .*none does not exist; .*model\.safetensors"),
    Row(
        "I35-not-a-checkpoint",
        "--init_from {}",
        r"init_from: .* holds .*texts\.jsonl; a run with a checkpoint, a directory with model\.safetensors",
    ),
    Row(
        "I35-damaged-run",
        "--init_from {}/other",
        r"init_from: no checkpoint of .*other verifies; restore.*checkpoint_00000010: model\.safetensors has changed",
        prepare=damaged_checkpoint,
    ),
    Row(
        "I35-damaged-checkpoint",
        "--init_from {}/other/checkpoints/checkpoint_00000010",
        r"init_from: .*checkpoint_00000010: model\.safetensors has changed.*; restore it",
        prepare=damaged_checkpoint,
    ),
    Row("I35-torn", "", r"none can be loaded.*checkpoint_00000010: no manifest\.json", 1, with_torn_checkpoint),
    Row("I35-temporary", "", "no checkpoint yet", None, with_temporary_checkpoint),
    Row(
        "I50",
        "",
        r"data_fingerprint: '\w{12}' there, '\w{12}' now.*--allow data_fingerprint",
        prepare=then(used_run, write("texts.jsonl", texts(65))),
    ),
    Row(
        "I50-all-keys-at-once",
        "--data.path {}/bad.jsonl --seed 1 --allow seed",
        r"--allow seed data\.path data_fingerprint$",
        prepare=then(used_run, write("bad.jsonl", texts(65))),
    ),
    Row(
        "I50-allowed",
        "--allow data_fingerprint",
        "no checkpoint yet",
        None,
        then(used_run, write("texts.jsonl", texts(65))),
    ),
]

PATHS = [
    Row(
        "I44-spaces",
        "--output_dir {}/my~run --data.path {}/with~space.jsonl",
        r"fresh start in .*/my run",
        None,
        write("with space.jsonl", texts(60)),
    ),
    Row("I44-unicode", "--output_dir {}/опыт-日本", r"fresh start in .*/опыт-日本", None),
    Row("I44-home", "--output_dir ~/there", r"fresh start in .*/home/there", None, environment=(("HOME", "{}/home"),)),
    Row(
        "I44-variable",
        "--output_dir $PLACE/there",
        r"fresh start in .*/place/there",
        None,
        environment=(("PLACE", "{}/place"),),
    ),
    Row("I44-slash", "--output_dir {}/run/", r"fresh start in .*/run", None),
    Row("I44-relative", "--output_dir here/run --data.path texts.jsonl", r"fresh start in .*/here/run", None),
    Row(
        "I44-config",
        "sub/../sub/c.yaml",
        r"fresh start",
        None,
        then(lambda p: (p / "sub").mkdir(), write("sub/c.yaml", CONFIG)),
    ),
]

DATA = [
    Row("I45-empty", "--data.path {}/bad.jsonl", r"contains no usable text", prepare=jsonl()),
    Row("I45-one", "--data.path {}/bad.jsonl", r"at least 1 and 2 are required", prepare=jsonl({"text": "one two"})),
    Row(
        "I45-few",
        "--global_batch_size 64 --micro_batch_size 64",
        r"global_batch_size: 64: the dataset has \d\d samples.*lower it to",
    ),
    Row(
        "I46-column",
        "--data.path {}/bad.jsonl",
        r"bad\.jsonl:1: no field 'text' among \['txt'\]; set --data\.text_column txt",
        prepare=jsonl({"txt": "a"}),
    ),
    Row(
        "I46-type",
        "--data.path {}/bad.jsonl",
        r"bad\.jsonl:2: 'text' is int, text is required",
        prepare=jsonl({"text": "a b"}, {"text": 3}),
    ),
    Row(
        "I46-none",
        "--data.path {}/bad.jsonl",
        r"bad\.jsonl:2: 'text' is NoneType",
        prepare=jsonl({"text": "a b"}, {"text": None}),
    ),
    Row("I46-blank", "--data.path {}/bad.jsonl", r"bad\.jsonl:1: 'text' is empty", prepare=jsonl({"text": "  "})),
    Row(
        "I46-sample",
        "--data.path {}/saved",
        r"sample 1 of .*saved.*NoneType.*--data\.max_bad_rows",
        prepare=saved_dataset,
    ),
    Row(
        "I46-saved-column",
        "--data.path {}/saved --data.text_column txt",
        r"'txt' is not a column.*did you mean 'text'\?",
        prepare=saved_dataset,
    ),
    Row(
        "I46-skipped",
        "--data.path {}/bad.jsonl --data.max_bad_rows 1",
        r"1 bad rows left out",
        None,
        write("bad.jsonl", '{"text": null}\n' + texts(60)),
    ),
    Row(
        "I49",
        "--data.path {}/bad.jsonl",
        r"bad\.jsonl:2: not JSON .*; one object per line",
        prepare=write("bad.jsonl", '{"text": "a"}\n{"text": \n'),
    ),
    Row(
        "I49-not-utf8",
        "--data.path {}/bad.jsonl",
        r"bad\.jsonl:1: byte \d+ of the line is not UTF-8",
        prepare=write("bad.jsonl", b'{"text": "\xff"}\n'),
    ),
    Row(
        "I51",
        "--data.path {}/load.py",
        r"load\.py' is a dataset script: code from a dataset is never run",
        prepare=write("load.py", "raise SystemExit(9)"),
    ),
    Row(
        "R8-removed",
        SHARDS,
        r"since the last start, removed: \S*1\.parquet .*data_fingerprint: '\w{12}' there, '\w{12}' now",
        prepare=removed_shard,
    ),
    Row(
        "R8-removed-allowed",
        f"{SHARDS} --allow data_fingerprint",
        r"removed: \S*1\.parquet .*no checkpoint yet",
        None,
        removed_shard,
    ),
    Row("R8-damaged", SHARDS, r"1\.parquet, row group 1 cannot be read", prepare=damaged_row_group),
    Row(
        "R8-no-rows",
        SHARDS,
        r"shards without rows are left out: \S*3\.parquet",
        None,
        lambda folder: parquet_shards(folder, {"text": []}),
    ),
    Row(
        "R8-mixed-schemas",
        SHARDS,
        r"column 'text' is int64 in \S*3\.parquet, but string in \S*0\.parquet",
        prepare=lambda folder: parquet_shards(folder, {"text": [1, 2]}),
    ),
    Row("R8-glob", "--data.path {}/none/*.parquet", r"none/\*\.parquet matches no file"),
    Row(
        "R8-formats",
        SHARDS,
        r"files of several formats, 3 parquet \(0\.parquet\), 1 jsonl \(a\.jsonl\)",
        prepare=then(parquet_shards, write("shards/a.jsonl", texts(9))),
    ),
    Row(
        "R8-line",
        "--data.path {}/bad.jsonl --data.read shards",
        r"bad\.jsonl:2: not JSON .*; one object per line",
        prepare=write("bad.jsonl", '{"text": "a"}\n{"text": \n'),
    ),
    Row(
        "R8-twice",
        SHARDS,
        r"0\.parquet and \S*again\.parquet are one file under two names",
        prepare=then(
            parquet_shards, lambda folder: os.link(folder / "shards/0.parquet", folder / "shards/again.parquet")
        ),
    ),
    Row(
        "I51-flag",
        "--data.trust_remote_code True",
        r"--data\.trust_remote_code is a name from other scripts; .*: code from a repository is never run",
    ),
    Row("I53-epochs", "--max_steps None", r"max_steps: None, max_epochs: None: give exactly one of them"),
]

OPENED: list[runs.Run] = []
"""Runs of this test: their locks end with the process, which continues here."""

ROWS = [*FLAGS, *FILES, *RESUMING, *PATHS, *DATA]


def words(text: str, folder: Path) -> list[str]:
    """A command line: that of the row over ``BASE``, or alone where the row begins with a source of its own."""
    given = text.split()
    own_source = bool(given) and not given[0].startswith("-")
    line = given if own_source else BASE.split() + given
    return [
        word.replace("{}", str(folder)) if word.startswith("~") else word.replace("{}", str(folder)).replace("~", " ")
        for word in line
    ]


def reset() -> None:
    """Forget the last run: Accelerate keeps its state in classes, logging in the root logger."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if logs._active is not None:
        logs._active.close()
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh directory, a copy of the environment, no model, and nothing kept from the test before."""

    def build(*_: object) -> None:
        raise ModelReachedError

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "NCCL_"))}
    environment |= {"ACCEL_TRAIN_CACHE": str(cache), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "CUDA_VISIBLE_DEVICES": ""}  # no wizard's file, no GPU
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    original = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    (tmp_path / "texts.jsonl").write_text(texts(60))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe.sd3_blocks, "build", build)
    open_run = opening.open_run
    monkeypatch.setattr(experiment, "open_run", lambda *a, **k: OPENED.append(open_run(*a, **k)) or OPENED[-1])
    yield tmp_path
    os.environ.clear()
    os.environ.update(original)
    reset()


def plain(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def outcome(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and error text of the recipe, as ``run_main`` would give them; None: the model was reached."""
    try:
        recipe.main(argv)
    except ModelReachedError:
        return None, ""
    except UsageError as error:
        return 2, str(error)
    except SystemExit as left:
        return int(left.code or 0), ""
    except RuntimeError as error:
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def names(folder: Path) -> set[str]:
    """Of all that lies below it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_recipe_answers(row: Row, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if row.prepare is not None:
        row.prepare(here)
        capsys.readouterr()
    os.environ.update({name: value.replace("{}", str(here)) for name, value in row.environment})
    before = names(here)
    code, text = outcome(words(row.argv, here))
    captured = capsys.readouterr()
    said = plain(f"{captured.out} {captured.err} {text}")
    assert (code, said) == (row.code, said)
    assert re.search(row.says, said), said
    if code is not None:
        assert "Traceback" not in said
        assert names(here) == before, "a refused start left files behind, or took some away"


def test_a_warm_up_that_was_shortened_stays_as_the_first_start_made_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelReachedError):
        recipe.main(words("--max_steps 15", here))
    OPENED[-1].note_training()
    factors = [OPENED[-1].saved["experiment"]["schedule.warmup_steps"], OPENED[-1].saved["resolved"]]
    assert factors == [1, {"schedule.decay_steps": 15, "schedule.warmup": [20, 1]}]
    for argv in ("--max_steps 60", "--schedule.warmup_steps 1", "{}/run/config.yaml"):
        reset()
        assert outcome(words(argv, here)) == (None, ""), argv
        assert OPENED[-1].saved["experiment"]["schedule.warmup_steps"] == 1
    reset()
    code, said = outcome(words("--schedule.warmup_steps 20", here))
    assert (code, "schedule.warmup_steps" in said) == (2, True), said
    reset()
    code, said = outcome(words("--schedule.warmup_steps 2", here))
    assert "schedule.warmup_steps: 1 there, 2 now" in said
    reset()
    assert outcome(words("{}/run/config.yaml --output_dir {}/another", here)) == (None, "")


def test_a_checkpoint_from_elsewhere_keeps_its_schedule(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The length, the warm-up and what was shortened are those of its first start, whatever ``max_steps`` says now."""
    for steps, kept, others in ((15, (1, 15), (60, 10, 2)), (40, (20, 40), (60, 15))):
        with pytest.raises(ModelReachedError):
            recipe.main(words(f"--max_steps {steps} --output_dir {{}}/of{steps}", here))
        path, saved = make(OPENED[-1].checkpoints, 1), OPENED[-1].saved
        commit.rewrite_manifest(path, {"experiment": saved["experiment"], "resolved": saved["resolved"]})
        for other in others:
            reset()
            place = f"--resume {path} --output_dir {{}}/{steps}-{other}"
            assert outcome(words(f"--max_steps {other} {place}", here)) == (None, ""), other
            found = OPENED[-1]
            assert (found.saved["experiment"]["schedule.warmup_steps"], found.resolved("schedule.decay_steps")) == kept
        reset()


def test_a_hub_out_of_reach_is_an_answer_and_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    os.environ["ACCEL_TRAIN_HUB_BACKOFF_SECONDS"] = "0"
    before = names(here)
    code, text = outcome(words("--resume hub:me/it@1", here))
    assert (code, text) == (2, text)
    assert re.search(r"hub checkpoint: me/it could not be downloaded .*HF_HUB_OFFLINE unset.*hf download me/it", text)
    assert names(here) == before


def test_a_stream_without_length_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I53: what `datasets` hands out for a source that it only streams."""
    import datasets

    stream = datasets.Dataset.from_dict({"text": ["one"]}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    code, said = outcome(words("--data.path owner/name", here))
    assert code == 2
    assert re.search(r"'owner/name' is a stream \(IterableDataset\): a dataset with a length .*JSONL", said), said


MACHINE_FILES = {
    "two_cpu.yaml": "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n",
    "bf16.yaml": "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n",
    "dynamo.yaml": "distributed_type: 'NO'\nnum_processes: 1\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
    "product.yaml": (
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 3, parallelism_config_dp_shard_size: 2}\n"
    ),
    "rank.yaml": (
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmachine_rank: 2\n"
        "main_process_ip: 127.0.0.1\nmain_process_port: 29512\n"
    ),
    "two_hosts.yaml": (
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\nmachine_rank: 0\n"
        "main_process_ip: 127.0.0.1\nmain_process_port: 29512\n"
    ),
    "accumulation.yaml": (
        "distributed_type: DEEPSPEED\nnum_processes: 1\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}\n"
    ),
}

SEEN_BY_A_PROCESS = [
    *(
        Row(
            f"I21-{name}",
            flags,
            r"WORLD_SIZE: '.*': a whole number, 1 or more, is required.*; unset the variable for one process",
            environment=(("WORLD_SIZE", text),),
        )
        for name, text, flags in (
            ("empty", "", ""),
            ("empty-smoke", "", "demo --smoke"),
            ("empty-auto", "", "--micro_batch_size auto"),
            ("no-number", "two", ""),
            ("no-process", "0", ""),
        )
    ),
    Row(
        "I21",
        says=r"WORLD_SIZE: 2 is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,.*unset it",
        environment=(("WORLD_SIZE", "2"),),
    ),
    Row(
        "I21-file",
        says=r"num_processes: 2 was asked for by .*two_cpu\.yaml.*WORLD_SIZE is 1",
        environment=(("ACCEL_TRAIN_TEST_PARENT", "accelerate launch --config_file {}/two_cpu.yaml"),),
    ),
    Row(
        "I21-precision",
        says=r"mixed_precision: bf16 in .* contradicts precision: fp32 of the experiment; .*--precision bf16",
        environment=(("ACCELERATE_MIXED_PRECISION", "bf16"),),
    ),
    Row(
        "I21-precision-agrees",
        "--precision bf16",
        "fresh start",
        None,
        environment=(("ACCELERATE_MIXED_PRECISION", "bf16"),),
    ),
    Row(
        "I21-dynamo",
        says=r"dynamo backend 'inductor' in .*; remove dynamo_config",
        environment=(("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),),
    ),
    Row(
        "I21-accumulation",
        says=r"gradient_accumulation_steps: 4 .* contradicts the experiment, whose batch sizes give 1",
        environment=(("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),),
    ),
    Row(
        "I21-accumulation-agrees",
        "--micro_batch_size 2",
        "fresh start",
        None,
        environment=(("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),),
    ),
    Row(
        "I20-environment",
        says=r"distributed_type: fsdp was asked for by the environment, but this machine has no",
        environment=(("ACCELERATE_USE_FSDP", "true"),),
    ),
    Row(
        "I20-deepspeed",
        says=r"distributed_type: deepspeed .*has no accelerator device",
        environment=(("ACCELERATE_USE_DEEPSPEED", "true"),),
    ),
    Row(
        "I22",
        says=r"parallelism_config.*product.*4|6.*4",
        environment=(("ACCEL_TRAIN_MACHINE_FILE", "{}/product.yaml"), ("WORLD_SIZE", "4")),
    ),
    Row("I37", "--precision fp16", r"precision: fp16 needs a GPU"),
]


@pytest.mark.parametrize("row", SEEN_BY_A_PROCESS, ids=lambda row: row.id)
def test_a_process_sees_what_the_launcher_really_did(
    row: Row, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.id.startswith(("I20", "I37")) and torch.accelerator.is_available():
        pytest.skip("this machine has what the row misses")
    for name, text in MACHINE_FILES.items():
        (here / name).write_text(text)
    parent = dict(row.environment).get("ACCEL_TRAIN_TEST_PARENT")
    if parent is not None:
        told = [word.replace("{}", str(here)) for word in parent.split()[1:]]
        line = ["/usr/bin/python", "/usr/bin/accelerate", *told, str(RECIPE)]
        monkeypatch.setattr(machine, "parent_command_lines", lambda: [line])
    test_the_recipe_answers(row, here, capsys)


LAUNCHERS = [
    Row("I22-launch", "launch --config_file {}/product.yaml {recipe}", r"parallelism_config", 2),
    Row(
        "I23-rank", "launch --config_file {}/rank.yaml {recipe}", r"machine_rank.*0 to 1, because num_machines is 2", 2
    ),
    Row(
        "I23-rank-flag",
        "launch --config_file {}/two_hosts.yaml --machine_rank 2 {recipe}",
        r"--machine_rank 2: must be 0 to 1, because num_machines is 2; count",
        2,
    ),
    Row(
        "I23-host",
        "launch --config_file {presets}/multi_node.yaml {recipe}",
        r"main_process_ip.*first-machine\.invalid.*address or name of machine 0",
        2,
    ),
    Row(
        "I23-port",
        "launch --config_file {}/two_hosts.yaml --main_process_port {port} {recipe}",
        r"main_process_port.*\d+ cannot be bound .*in use",
        2,
    ),
    Row(
        "check-precision",
        "check --config_file {}/bf16.yaml {recipe} demo",
        r"mixed_precision: bf16 in .*bf16\.yaml contradicts precision: fp32",
        2,
    ),
    Row("check-dynamo", "check --config_file {}/dynamo.yaml {recipe} demo", r"dynamo backend 'inductor'", 2),
    Row(
        "check-accumulation",
        "check --config_file {}/accumulation.yaml {recipe} demo",
        r"gradient_accumulation_steps: 4 .*give 1",
        2,
    ),
]


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.id)
def test_our_launcher_answers_before_it_starts_anything(
    row: Row, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in MACHINE_FILES.items():
        (here / name).write_text(text)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        filled = [word.format(str(here), recipe=RECIPE, presets=PRESETS, port=port) for word in row.argv.split()]
        with pytest.raises(UsageError) as caught:
            cli._main(filled)
    assert re.search(row.says, plain(str(caught.value))), str(caught.value)


def run(command: list[str], here: Path) -> tuple[int, str]:
    """Exit code and output; on a timeout the whole process group goes, so that no recipe trains on by itself."""
    child = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=here,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
    return child.returncode, output


def accelerate(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *arguments]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--optmizer.lr", "1"],
            r"exit code 2\): --optmizer\.lr: .*did you mean '--optimizer\.lr'\?",
        ),
        (["--seed=-1"], r"error \(wrong usage, exit code 2\): command line: seed: -1 is refused"),
    ],
    ids=["I24", "I41"],
)
def test_wrong_usage_ends_a_process_with_2_and_no_traceback(flags: list[str], says: str, here: Path) -> None:
    code, output = run([sys.executable, str(RECIPE), *flags], here)
    assert code == 2, output
    assert re.search(says, plain(output)), output
    assert "Traceback" not in output
    assert not (here / "runs").exists()


ACCELERATE_LAUNCHES = {
    "I19": (
        ["--cpu", "--num_processes", "2"],
        r"num_processes: 2 was asked for by the command line of `accelerate launch`, but WORLD_SIZE is 1",
    ),
    "I19-file": (
        ["--config_file", "{}/two_cpu.yaml"],
        r"num_processes: 2 was asked for by .*two_cpu\.yaml, but WORLD_SIZE is 1",
    ),
    "I20-one": (
        ["--config_file", f"{PRESETS}/fsdp2.yaml", "--num_processes", "1"],
        r"distributed_type: fsdp2 was asked for by .*fsdp2\.yaml, but this machine has no accelerator device",
    ),
    "I20-two": (
        ["--config_file", f"{PRESETS}/fsdp2.yaml", "--num_processes", "2"],
        r"distributed_type: fsdp2 was asked for by .*fsdp2\.yaml, but this machine has no accelerator device",
    ),
    "I21-precision": (
        ["--config_file", "{}/bf16.yaml"],
        r"mixed_precision: bf16 in .*bf16\.yaml contradicts precision: fp32",
    ),
}


IMPLIED = {"I19-file", "I20-one"}
"""By the same mistake on two processes, or as a flag."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IMPLIED else ()) for name in ACCELERATE_LAUNCHES],
)
def test_the_silent_fallbacks_of_accelerate_launch_stop(name: str, here: Path) -> None:
    for file, text in MACHINE_FILES.items():
        (here / file).write_text(text)
    flags, says = ACCELERATE_LAUNCHES[name]
    code, output = run(accelerate(*(f.replace("{}", str(here)) for f in flags), str(RECIPE), "demo"), here)
    assert code != 0, output
    assert re.search(r"error \(wrong usage, exit code 2\): " + says, plain(output)), output
    assert re.search(r"\(what follows is a report of (torchrun|accelerate launch): it can be ignored", output), output
    if "torchrun:" in output:  # it shows the error once more, below its traceback
        assert re.search(says, plain(output[output.rindex("Traceback") :])), output
    assert not (here / "runs").exists()
