"""The other environment: found by directory or interpreter, refused with the command that mends it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.rerun.upgrade import environment
from tests.rerun.upgrade import environments


@pytest.fixture(autouse=True)
def without_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would reach the other environment too."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


def refusal(place: Path) -> str:
    with pytest.raises(UsageError) as refused:
        environment.open_environment(str(place))
    return str(refused.value)


def test_an_environment_is_found_by_its_directory_and_by_its_interpreter(tmp_path: Path) -> None:
    made = environments.build(tmp_path / "an environment")
    here = environment.this_environment()
    assert here.packages["torch"]
    for place in (made, made / "bin" / "python"):
        found = environment.open_environment(str(place))
        # Not the interpreter behind the link, which has other packages.
        assert found.interpreter == str(made / "bin" / "python")
        assert (found.packages, found.sources_sha256) == (here.packages, here.sources_sha256)
        assert environment.differing_versions(here, found) == {}


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nothing")
    assert "directory of a virtual environment (with bin/python in it) or a Python interpreter is required" in said
    assert "python -m venv" in said
    text = tmp_path / "text"
    text.write_text("no program")
    assert "cannot be run" in refusal(text)


def test_an_environment_without_this_source_is_refused_with_the_command_to_install_it(tmp_path: Path) -> None:
    empty = environments.build(tmp_path / "empty")
    (paths,) = empty.glob("lib/python*/site-packages/outer.pth")
    lines = paths.read_text().splitlines()
    paths.write_text("")
    command = f"{empty / 'bin' / 'python'} -m pip install -e {environments.ROOT}"
    said = refusal(empty)
    assert "accel_train cannot be imported there (ModuleNotFoundError: No module named 'accel_train')" in said
    assert command in said
    # An older source: a difference could be its own.
    copy = tmp_path / "older" / "accel_train"
    for path in environment.SOURCE.rglob("*.py"):
        target = copy / path.relative_to(environment.SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    paths.write_text("\n".join([str(copy.parent), *lines[1:]]))
    environment.open_environment(str(empty))
    (copy / "rng.py").write_text((copy / "rng.py").read_text() + "\n")
    said = refusal(empty)
    assert f"its accel_train in {copy} has different sources than {environment.SOURCE}" in said
    assert command in said


def test_versions_that_differ_are_listed_with_those_of_effect_first() -> None:
    here = environment.Environment(sys.executable, "3.11.7", {"aaa": "1", "torch": "2.13", "numpy": "2"}, "", "")
    there = replace(here, python="3.12.1", packages={"torch": "2.14", "numpy": "2", "zzz": "3"})
    found = environment.differing_versions(here, there)
    assert list(found.items()) == [
        ("python", ("3.11.7", "3.12.1")),
        ("torch", ("2.13", "2.14")),
        ("aaa", ("1", None)),
        ("zzz", (None, "3")),
    ]
    assert environment.differing_versions(here, here) == {}


def test_copies_that_setuptools_carries_along_are_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.this_environment().packages
    for folder, name in (("_vendor", "carried"), ("beside", "installed")):
        metadata = tmp_path / folder / f"{name}-1.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert environment.this_environment().packages == {**before, "installed": "1.0"}
