"""Datasets of a Hub whose branch moves on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from accel_train.config import UsageError
from accel_train.data.tables.hub_datasets import HubId, commit_of, load_hub_dataset, parse_hub_id
from recipes import causal_lm
from tests.domains.language import tiny
from tests.hub_server import HubServer, Repository, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        server.repositories["datasets/me/rows"] = Repository(private=False)
        yield server


@pytest.fixture
def push(hub: HubServer) -> Callable[..., str]:
    def push(*rows: str) -> str:
        content = "".join(f'{{"text": "{row}"}}\n' for row in rows).encode()
        return hub.repositories["datasets/me/rows"].add("main", "rows", "", {"train.jsonl": content}).oid

    return push


def texts(path: str) -> list[str]:
    return load_hub_dataset(path, "train")["text"][:]


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_an_id_has_up_to_three_parts() -> None:
    assert parse_hub_id("name") == HubId("name", None, None)
    assert parse_hub_id("owner/name:small-v1") == HubId("owner/name", "small-v1", None)
    assert parse_hub_id("owner/name@refs/convert/parquet") == HubId("owner/name", None, "refs/convert/parquet")
    assert parse_hub_id("owner/name:en@v1.0") == HubId("owner/name", "en", "v1.0")
    for path in ("a/b/c", "a:b:c", "a@", "a@b:c", "a/b@/c", "ä/b"):
        assert parse_hub_id(path) is None, path


def test_a_revision_is_read_after_the_branch_has_moved_on(
    hub: HubServer, push: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "accel_train")
    first = push("one")
    hub.repositories["datasets/me/rows"].tags["v1"] = first
    assert texts("me/rows") == ["one"]
    assert caplog.messages[0].startswith("--data.path me/rows: no such file or folder here, so the Hub is asked")
    assert (
        f"--data.path me/rows: to read the same commit in later runs, give --data.path me/rows@{first}" in caplog.text
    )
    second = push("one", "two")
    assert texts("me/rows") == ["one", "two"]
    assert texts("me/rows@v1") == ["one"]
    caplog.clear()
    assert texts(f"me/rows@{first}") == ["one"]
    assert not caplog.text
    assert commit_of(load_hub_dataset(f"me/rows@{second}", "train")) == second
    with pytest.raises(UsageError, match=r"--data\.path 'me/rows@v2', split 'train': .*RevisionNotFound"):
        texts("me/rows@v2")


def test_a_run_goes_on_with_the_commit_that_it_began_with(
    push: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{number} {text}" for number in range(12) for text in tiny.TEXTS]
    first = push(*rows)
    flags = [
        *("causal_lm_smoke", "--output_dir", str(tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")),
        *("--data.vocab_size", "320", "--data.max_length", "32", "--evaluation.every", "0", "--precision", "fp32"),
    ]
    assert causal_lm.main([*flags, "--data.path", "me/rows", "--max_steps", "1"]) == 0
    assert f"--data.path me/rows@{first}" in capsys.readouterr().out
    push(*rows, "another row")
    with pytest.raises(UsageError, match="data_fingerprint"):
        causal_lm.main([*flags, "--data.path", "me/rows", "--max_steps", "2"])
    pinned = ["--data.path", f"me/rows@{first}", "--allow", "data.path"]
    assert causal_lm.main([*flags, *pinned, "--max_steps", "2"]) == 0
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_00000002").is_dir()


def test_without_the_hub_another_commit_than_the_asked_one_is_refused(
    hub: HubServer, push: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` then gives what it has read last, and says so in a warning alone."""
    first = push("one")
    assert texts("me/rows") == ["one"]
    # Which datasets in memory would hide.
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 2**30)
    offline(monkeypatch)
    assert texts(f"me/rows@{first}") == ["one"]
    other = "0" * 40
    with pytest.raises(UsageError, match=rf"commit {other} is required, but without the Hub .* read last, {first}\."):
        texts(f"me/rows@{other}")
    with pytest.raises(UsageError, match=r"its revision must be a commit"):
        texts("me/rows@main")


def test_without_the_hub_each_commit_in_the_cache_is_read(
    push: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {push(row): [row] for row in ("one", "two", "three")}
    for commit, rows in commits.items():
        assert texts(f"me/rows@{commit}") == rows
    offline(monkeypatch)
    for commit, rows in commits.items():
        found = load_hub_dataset(f"me/rows@{commit}", "train")
        assert (found["text"][:], commit_of(found)) == (rows, commit)
    with pytest.raises(UsageError, match=r"split 'test': .*Unknown split"):
        load_hub_dataset(f"me/rows@{next(iter(commits))}", "test")
