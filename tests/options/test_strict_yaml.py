"""The strict reader of settings: YAML 1.2 scalars, every refusal with its position, and no other exception."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.options.strict_yaml import MAX_BYTES, YamlError, place_of, read_document, read_yaml

SCALARS = {
    "1e-4": 1e-4,
    "1E5": 1e5,
    "+1.5e+3": 1500.0,
    ".5": 0.5,
    "1.": 1.0,
    "-12": -12,
    "+3": 3,
    "0": 0,
    "0x1F": 31,
    ".inf": math.inf,
    "-.INF": -math.inf,
    "true": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "": None,
    # text, where YAML 1.1 finds something else
    "no": "no",
    "NO": "NO",
    "on": "on",
    "Yes": "Yes",
    "y": "y",
    "1_000": "1_000",
    "12:30": "12:30",
    "190:20:30": "190:20:30",
    "2024-01-01": "2024-01-01",
    "0o17": "0o17",
    "0b11": "0b11",
    "1.2.3": "1.2.3",
    "nan": "nan",
    "inf": "inf",
    "=": "=",
    # quoted is text
    "'1'": "1",
    '"true"': "true",
    "!!str 5": "5",
    "!!float 5": 5.0,
}

REFUSED = {
    "empty": (b"", r"the file is empty; write"),
    "blank": (b" \n\r\n", r"the file is empty"),
    "comments only": (b"# a\n", r"comments only"),
    "only a marker": (b"---\n", r"comments only"),
    "list": (b"- 1\n", r"the top is a list, not a mapping"),
    "scalar": (b"hello", r"the top is a single value"),
    "duplicate": (b"a: 1\nb: 2\na: 3\n", r":3:1: key `a` is given twice, first at line 1"),
    "nested duplicate": (b"x:\n  a: 1\n  a: 1\n", r":3:3: key `x.a` is given twice, first at line 2"),
    "duplicate in quotes": (b"a: 1\n'a': 2\n", r":2:1: key `a` is given twice"),
    "tab": (b"a:\n\tb: 1\n", r":2:1: a tab.*indent with spaces"),
    "tab first": (b"\ta: 1", r":1:1: a tab"),
    "colon": (b"x: 1\na: b: c\n", r":2:5: not valid YAML: mapping values"),
    "open quote": (b'a: "x\n', r":2:1: not valid YAML: found unexpected end of stream"),
    "open list": (b"a: [1, 2\nb: 3\n", r":2:2: not valid YAML"),
    "object": (
        b"a: !!python/object/apply:os.system ['touch canary']",
        r":1:4: unsupported tag `!!python/obj",
    ),
    "name": (b"a: !!python/name:os.system", r"unsupported tag `!!python/name"),
    "own tag": (b"a: !thing 1", r"unsupported tag `!thing`"),
    "set": (b"!!set {a: 1}", r"unsupported tag `!!set`"),
    "binary": (b"a: !!binary aGk=", r"unsupported tag `!!binary`"),
    "timestamp": (b"a: !!timestamp 2024-01-01", r"unsupported tag"),
    "wrong tag": (b"a: !!int x", r":1:4: `x` is not of type int"),
    "underscore in an int": (b"a: !!int 1_000", r":1:4: `1_000` is not of type int"),
    "underscore in a float": (b"a: !!float 1_0.5", r"`1_0.5` is not of type float"),
    "null that is not": (b"a: !!null x", r"`x` is not of type null"),
    "alias": (b"a: &x 1\nb: *x\n", r":2:4: alias `\*x` is not supported; write the value out"),
    "recursive alias": (b"&x a: *x", r"alias `\*x`"),
    "two documents": (b"a: 1\n---\nb: 2\n", r":2:1: a second document begins"),
    "octal": (b"a: 017", r":1:4: number `017` begins with 0"),
    "number as key": (b"1: a", r":1:1: key '1' is not text"),
    "null as key": (b"null: a", r":1:1: key 'null' is not text"),
    "list as key": (b"? [1]\n: 2\n", r"key a list or mapping is not text"),
    "overflow": (b"a: 1e999", r"number `1e999` is too large for a float"),
    "long number": (b"a: " + b"9" * 5000, r":1:4: `9{40}` is not of type int"),
    "deep": (b"a: " + b"[" * 5000, r"nested too deeply"),
    "deeper": (b"a: " + b"{a: " * 50000, r"nested too deeply"),
    "control character": (b"a: 1\nb: \x01\n", r":2:4: character U\+0001"),
    "latin-1": (b"a: 1\nb: caf\xe9\n", r":2:7: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "utf-16": ("a: 1".encode("utf-16"), r":1:1: byte 0xff is not UTF-8"),
    "surrogate": (b'a: "\\ud83d"', r":1:4: half of a character"),
    "no such character": (b'a: "\\UFFFFFFFF"', r"an escape in quotes names no character"),
    "10 MB": (b"a: 1\n" + b"#" * 10_000_000, r"larger than 256 KiB"),
}

REFUSED_JSON = {
    "empty": ("", r"the file is empty"),
    "duplicate": ('{"x": {"a": 1,\n "a": 2}}', r"key `a` is given twice in one mapping"),
    "list": ("[1]", r"the top is not a mapping"),
    "broken": ('{"a": 1,\n "b" 2}', r":2:6: not valid JSON: Expecting ':' delimiter"),
    "NaN": ('{"a": NaN}', r"number `NaN` is not a finite float"),
    "overflow": ('{"a": 1e999}', r"number `1e999` is not a finite float"),
    "deep": ("[" * 100_000, r"not valid JSON"),
    "long number": ('{"a": ' + "9" * 5000 + "}", r"not valid JSON"),
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_follow_yaml_1_2(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"a: {text}\n")
    value = read_yaml(file)["a"]
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


def test_nan_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: .nan\nb: -.5e-3\n")
    values = read_yaml(file)
    assert math.isnan(float(str(values["a"])))
    assert values["b"] == -0.0005


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_point_at_the_place(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(YamlError, match=message) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(str(file))
    assert ";" in str(caught.value), "the message must end with what to do"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", REFUSED_JSON)
def test_json_refusals(tmp_path: Path, name: str) -> None:
    content, message = REFUSED_JSON[name]
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(YamlError, match=message):
        read_yaml(file)


def test_tags_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_bytes(REFUSED["object"][0])
    with pytest.raises(YamlError):
        read_yaml(tmp_path / "a.yaml")
    assert not (tmp_path / "canary").exists()


def test_bom_crlf_unicode_and_flow_style(tmp_path: Path) -> None:
    file = tmp_path / "dir with space ü" / "a.yml"
    file.parent.mkdir()
    file.write_bytes(b"\xef\xbb\xbfa: {b: [1, no], c: \xc3\xbc}\r\nd:\r\n  - x\r\n")
    assert read_yaml(file) == {"a": {"b": [1, "no"], "c": "ü"}, "d": ["x"]}


def test_json_content_in_a_yaml_file(tmp_path: Path) -> None:
    """`accelerate config default` writes JSON into default_config.yaml."""
    values = {"a": {"b": [1, 2.5, None, True, "no"]}, "c": "x"}
    for name in ("a.yaml", "a.json"):
        (tmp_path / name).write_text(json.dumps(values, indent=2))
        assert read_yaml(tmp_path / name) == values


def test_places_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# note\na: 1\nb:\n  c: 2\n  d: {e: 3}\n")
    places = read_document(file).places
    assert places == {("a",): (2, 1), ("b",): (3, 1), ("b", "c"): (4, 3), ("b", "d"): (5, 3), ("b", "d", "e"): (5, 7)}
    assert place_of("f", places, ("b", "d", "e")) == "f:5:7"
    assert place_of("f", places, ("b", "missing")) == "f:3:1"
    assert place_of("f", places, ("missing", "c")) == "f"


def test_unreadable_paths(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for path, reason in [
        (tmp_path / "missing.yaml", "no such file"),
        (tmp_path, "is a directory"),
        (loop, "symbolic links"),
    ]:
        with pytest.raises(YamlError, match=rf"cannot be read: .*{reason}.*; give"):
            read_yaml(path)
    with pytest.raises(YamlError, match="larger than"):
        read_yaml(Path("/dev/zero"))


def test_size_limit_is_exact(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"a: 1\n" + b"#" * (MAX_BYTES - 5))
    assert read_yaml(file) == {"a": 1}
    file.write_bytes(b"a: 1\n" + b"#" * (MAX_BYTES - 4))
    with pytest.raises(YamlError):
        read_yaml(file)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
TREES = st.dictionaries(
    st.text(min_size=1, max_size=6),
    st.recursive(
        LEAVES,
        lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=4), kids, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_what_pyyaml_writes_in_quotes_is_read_back(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(yaml.safe_dump(tree, default_style='"', allow_unicode=False), encoding="utf-8")
    assert read_yaml(file) == tree


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_json_is_read_back(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    file = tmp_path_factory.mktemp("json") / "a.json"
    try:
        file.write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")
    except ValueError:  # an infinity
        return
    assert read_yaml(file) == tree


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet="ab:-[]{}'\"\\!&*|>#%@`,? \t\n01.e~", max_size=30).map(str.encode))
def test_any_bytes_give_a_mapping_or_a_yaml_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("a.yaml", "a.json"):
        (folder / name).write_bytes(content)
        with contextlib.suppress(YamlError):
            assert isinstance(read_yaml(folder / name), dict)
