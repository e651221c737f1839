"""Foreign weights: what is sound is read exactly, what is not is refused by name, and nothing in it ever runs."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.store.weights import TensorReader, best_stem, find_tensors, has_ema, load_weights
from tests.store.test_commit import make

FLOAT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


class Canary:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


PICKLED = (
    ".metadata",
    "__0_0.distcp",
    "custom_checkpoint_0.pkl",
    "optimizer.bin",
    "pytorch_model.bin",
    "random_states_0.pkl",
    "scheduler.bin",
    "training_args.bin",
    "model.pt",
    "latents.pt",
)


def plant(directory: Path) -> Path:
    """Put a malicious pickle under every name that tools read as one; returns the file that none may create."""
    canary = directory.parent / "canary"
    directory.mkdir(parents=True, exist_ok=True)
    for name in PICKLED:
        (directory / name).write_bytes(pickle.dumps(Canary(canary)))
    return canary


def write_raw(path: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> Path:
    """A safetensors file with any header: JSON of a value, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(3, 5, generator=generator) for i in range(4)}


def write_sharded(directory: Path, stem: str = "model") -> dict[str, Tensor]:
    """Two tensors a file, as the Hub's library writes them."""
    values = tensors()
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(values, directory, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=130)
    return values


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def read_weights(directory: Path, stem: str = "model") -> dict[str, Tensor]:
    """Tensors of a collection as they are on the disk."""
    tensors = find_tensors(directory, stem)
    with TensorReader(tensors) as reader:
        return {name: reader.read(name) for name in tensors}


def refused(directory: Path, match: str = ".", **arguments: Any) -> str:
    with pytest.raises(UsageError, match=match) as error:
        read_weights(directory, **arguments)
    return str(error.value)


# ------------------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize("stem", ["model", "ema", "diffusion_pytorch_model"])
def test_one_file_and_several_read_the_same(tmp_path: Path, stem: str) -> None:
    values = write_sharded(tmp_path / "many", stem)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 2
    (tmp_path / "one").mkdir()
    save_file(values, tmp_path / "one" / f"{stem}.safetensors")
    for place in ("one", "many"):
        read = read_weights(tmp_path / place, stem)
        assert read.keys() == values.keys()
        assert all(torch.equal(read[name], values[name]) for name in values)


def test_a_variant_has_its_index_where_diffusers_puts_it(tmp_path: Path) -> None:
    values = write_sharded(tmp_path, "model.fp16")
    (tmp_path / "model.fp16.safetensors.index.json").rename(tmp_path / "model.safetensors.index.fp16.json")
    assert find_tensors(tmp_path, "model.fp16").keys() == values.keys()


def test_what_the_hub_library_reads_is_read_the_same(tmp_path: Path) -> None:
    """Every dtype the format and torch share; facts of the header against the tensors themselves."""
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
    values = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    values |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_weights(tmp_path)
    infos = find_tensors(tmp_path)
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
        assert (infos[name].shape, infos[name].elements) == (tuple(value.shape), value.numel())


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    values = write_sharded(tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    for path in list((tmp_path / "snapshot").iterdir()):
        target = path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(target)
    assert read_weights(tmp_path / "snapshot").keys() == values.keys()


# ----------------------------------------------------------------------------------- I54: files that are not sound
HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "header longer than the file": (FLOAT, b"", 2**40, "header would have 1099511627776 bytes"),
    "header length of 2**64 - 1": (FLOAT, b"", 2**64 - 1, "header would have"),
    "header of no length": (b"", b"\0" * 8, 0, "header would have 0 bytes"),
    "negative offsets": ({"a": FLOAT | {"data_offsets": [-8, 0]}}, b"\0" * 8, None, "-8"),
    "offsets beyond the end": ({"a": FLOAT | {"data_offsets": [8, 16]}}, b"\0" * 8, None, "offset"),
    "overlapping tensors": (
        {"a": FLOAT, "b": FLOAT | {"shape": [1], "data_offsets": [4, 8]}},
        b"\0" * 8,
        None,
        "offset for tensor `b`",
    ),
    "bytes of no tensor": ({"a": FLOAT}, b"\0" * 9, None, "not fully covered"),
    "a shape of another size": ({"a": FLOAT | {"shape": [3]}}, b"\0" * 8, None, "shape"),
    "a shape that overflows": ({"a": FLOAT | {"shape": [2**40, 2**40]}}, b"\0" * 8, None, "overflow"),
    "an unknown dtype": ({"a": FLOAT | {"dtype": "F31"}}, b"\0" * 8, None, "F31"),
    "the same name twice": (
        b'{"a":%s,"a":%s}' % ((json.dumps(FLOAT).encode(),) * 2),
        b"\0" * 8,
        None,
        "names 'a' twice",
    ),
    "no JSON": (b"weights!", b"\0" * 8, None, "Expecting value"),
    "no UTF-8": (b"\xff\xfe\xfd", b"\0" * 8, None, "sound"),
    "a list": ([FLOAT], b"\0" * 8, None, "sequence"),
    "JSON nested without end": (b"[" * 200_000, b"", None, "recursion|nested"),
    "no tensors": ({"__metadata__": {"format": "pt"}}, b"", None, "contains no tensors"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_that_is_not_sound_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, data, length, reason = HEADERS[case]
    path = write_raw(tmp_path / "model.safetensors", header, data, length)
    assert str(path) in refused(tmp_path, f"(?i){reason}")


CONTENTS = {"none": b"", "one": b"\0", "zip": b"PK\3\4" + b"\0" * 60, "pickle": pickle.dumps(1), "json": b"{}" * 50}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_other_contents_under_the_name_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors: not a valid safetensors file" in refused(tmp_path)


@pytest.mark.parametrize("cut", [1, 7, 8, 40, 100])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-cut])
    refused(tmp_path, "not a valid safetensors file")


numbers = st.one_of(st.integers(-9, 40), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 1.5, None, "8"]))
KINDS = ["F32", "BF16", "F16", "F64", "I8", "U64", "BOOL", "F8_E4M3", "F4", "F6_E2M3", "C64", 3]
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(KINDS),
        "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
        "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
        "more": numbers,
    },
)
headers = st.one_of(
    st.binary(max_size=64),
    st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6),
    st.dictionaries(st.text(max_size=4) | st.sampled_from(["__metadata__", "a"]), entries, max_size=4),
    st.lists(st.tuples(st.sampled_from("ab"), entries), max_size=4).map(
        lambda pairs: ("{" + ",".join(f'"{k}":{json.dumps(v)}' for k, v in pairs) + "}").encode()
    ),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers, st.binary(max_size=48), st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 100))
@example({"a": FLOAT | {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}, b"\0" * 6, None)
@example({"a": FLOAT | {"dtype": "F4", "shape": [16]}}, b"\0" * 8, None)
@example({"a": FLOAT | {"dtype": "C64", "shape": [1]}}, b"\0" * 8, None)
@example({"a": FLOAT | {"shape": [0, 2**62], "data_offsets": [0, 0]}}, b"", None)
@example({"a\0": FLOAT}, b"\0" * 8, None)
def test_whatever_the_header_says_nothing_but_a_usage_error_comes_out(
    tmp_path: Path, header: Any, data: bytes, length: int | None
) -> None:
    write_raw(tmp_path / "model.safetensors", header, data, length)
    model = nn.Linear(1, 2, bias=False)
    before = model.weight.detach().clone()
    for read in (lambda: read_weights(tmp_path), lambda: load_weights(tmp_path, "model", model)):
        with suppress(UsageError):
            read()
    assert torch.equal(model.weight, before)  # no header above names its parameter


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_sound_file_with_any_bytes_changed_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    save_file({"weight": torch.ones(2, 1)}, tmp_path / "model.safetensors")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(content)
    model = nn.Linear(1, 2, bias=False)
    try:
        load_weights(tmp_path, "model", model)
    except UsageError:
        return
    assert torch.isfinite(model.weight).all()


# ---------------------------------------------------------------------------------- I55: indexes that lead elsewhere
ELSEWHERE = [
    "../x.safetensors",
    "/etc/passwd",
    "sub/x.safetensors",
    "..",
    ".",
    "a\\b.safetensors",
    "C:x",
    "./x",
    "a\0b",
]


@pytest.mark.parametrize("file", ELSEWHERE, ids=ascii)
def test_an_index_may_not_lead_elsewhere(tmp_path: Path, file: str) -> None:
    write_sharded(tmp_path / "weights")
    for outside in ("x.safetensors", "weights/sub/x.safetensors"):
        (tmp_path / outside).parent.mkdir(exist_ok=True)
        save_file({"layers.0.weight": torch.zeros(3, 5)}, tmp_path / outside)
    edit_index(tmp_path / "weights", lambda weight_map: weight_map.update({"layers.0.weight": file}))
    text = refused(tmp_path / "weights", "not a file next to it")
    assert repr(file) in text


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    def case(name: str, change: Callable[[dict[str, str]], None], match: str) -> None:
        write_sharded(tmp_path / name)
        edit_index(tmp_path / name, change)
        refused(tmp_path / name, match)

    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    case("unlisted", lambda m: m.pop("layers.1.weight"), "layers.1.weight is in the file, not in the index")
    case("invented", lambda m: m.update(x=first), "x is in the index, not in the file")
    case("swapped", lambda m: m.update({"layers.0.weight": second}), "disagrees with")
    case("missing", lambda m: m.update(x="model-00003-of-00002.safetensors"), "which is not there")
    case("empty", lambda m: m.clear(), "contains no tensors")
    case("pickle", lambda m: m.update(dict.fromkeys(m, "pytorch_model.bin")), "are a pickle")


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    values = write_sharded(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    extra = {name: values[name] for name in ("layers.0.weight", "layers.2.weight", "layers.3.weight")}
    save_file(extra, second)
    refused(tmp_path, "layers.0.weight is in model-00001-of-00002.safetensors and again in model-00002")


def test_the_same_tensor_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    at = text.index('"layers.0.weight"')
    index.write_text(text[:at] + '"layers.1.weight": "model-00001-of-00002.safetensors", ' + text[at:])
    refused(tmp_path, "the key 'layers.1.weight' is given twice")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff", '"x"'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "model.safetensors.index.json" in refused(tmp_path)


def test_a_file_and_an_index_at_once_are_refused(tmp_path: Path) -> None:
    values = write_sharded(tmp_path)
    save_file(values, tmp_path / "model.safetensors")
    refused(tmp_path, "delete the one that is not current")


# ------------------------------------------------------------------------------------------- I56, I57: never a pickle
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl", "model.pth", "MODEL.BIN"])
def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights").mkdir()
    canary = tmp_path / "canary"
    path = tmp_path / "weights" / name
    path.write_bytes(pickle.dumps(Canary(canary)))
    for place in (tmp_path / "weights", path):
        text = refused(place, "are a pickle")
        assert name in text
        assert "safetensors.torch.save_file" in text
    assert not canary.exists()
    pickle.loads(path.read_bytes())  # the bait is a real one
    assert canary.exists()


def test_reading_beside_pickles_runs_none(tmp_path: Path) -> None:
    canary = plant(tmp_path / "weights")
    values = write_sharded(tmp_path / "weights")
    config = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "_name_or_path": "../../evil"}
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    (tmp_path / "weights" / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    assert read_weights(tmp_path / "weights").keys() == values.keys()
    assert not canary.exists()


def test_a_wrong_place_is_named_with_what_is_there(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(tmp_path / "file")
    assert "it contains file" in refused(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "it contains nothing" in refused(tmp_path / "empty")


# ------------------------------------------------------------------------------------------------------------ loading
class Net(nn.Module):
    """Parameters, a tied one, and buffers that are saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.body.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def save(directory: Path, **values: Tensor) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name.replace("__", "."): value for name, value in values.items()}, directory / "model.safetensors")
    return directory


def test_weights_are_loaded_exactly(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 4), torch.randn(3)
    model = Net()
    load_weights(save(tmp_path, body__weight=weight, body__bias=bias), "model", model)
    assert torch.equal(model.head.weight, weight)
    assert torch.equal(model.body.bias, bias)
    assert model.count == 3
    load_weights(save(tmp_path, body__weight=weight.bfloat16(), body__bias=bias, count=torch.tensor(9)), "model", model)
    assert torch.equal(model.body.weight, weight.bfloat16().float())
    assert model.count == 9
    assert model.body.weight.dtype == torch.float32


def test_an_average_is_completed_by_the_weights_beside_it(tmp_path: Path) -> None:
    """Buffers and frozen parameters have no average: a model would compute with its initial ones."""
    trained = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    trained(torch.randn(50, 3) + 2)  # moves the statistics
    average = {
        "2.weight": torch.ones(2, 4),
        "2.bias": torch.ones(2),
        "1.weight": torch.ones(4),
        "1.bias": torch.ones(4),
    }
    save_file(dict(trained.state_dict()), tmp_path / "model.safetensors")
    save_file(average, tmp_path / "ema.safetensors")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    load_weights(tmp_path, best_stem(tmp_path), model)
    expected = dict(trained.state_dict()) | average
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    # Where the caller has loaded the rest, it stays.
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    load_weights(tmp_path, "ema", other, required=())
    assert torch.equal(other[1].running_mean, torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"body__weight": None}, r"body.weight: missing in the file, \(3, 4\) in the model"),
        ({"more": torch.zeros(1)}, r"more: \(1,\) in the file, missing in the model"),
        ({"body__bias": torch.zeros(4)}, r"body.bias: \(4,\) in the file, \(3,\) in the model"),
        ({"body__bias": torch.zeros(3, dtype=torch.int64)}, "body.bias: I64 in the file, float32 in the model"),
        ({"body__bias": torch.zeros(3).to(torch.float8_e4m3fn)}, "body.bias: F8_E4M3 in the file, float32"),
        ({"count": torch.tensor(1.0)}, "count: F32 in the file, int64 in the model"),
        ({"count": torch.tensor(True)}, "count: BOOL in the file, int64 in the model"),
        ({"scratch": torch.zeros(2)}, r"scratch: \(2,\) in the file, missing in the model"),
        ({f"x{i}": torch.zeros(1) for i in range(5)}, "and 2 more"),
        ({"body__bias": torch.tensor([0.0, float("nan"), 1.0])}, r"body.bias contains 1 value\(s\) that are NaN"),
        ({"body__bias": torch.tensor([0.0, 2.0, float("inf")])}, r"body.bias contains 1 value\(s\)"),
        ({"body__bias": torch.tensor([0.0, 2.0, float("-inf")])}, r"body.bias contains 1 value\(s\)"),
        ({"body__weight": torch.full((3, 4), float("-inf"))}, r"body.weight contains 12 value\(s\)"),
        (
            {"body__weight": torch.full((3, 4), float("inf"), dtype=torch.float16)},
            r"body.weight contains 12 value\(s\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_changes(
    tmp_path: Path, change: dict[str, Tensor | None], says: str
) -> None:
    values = {"body__weight": torch.ones(3, 4), "body__bias": torch.ones(3)} | change
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=says):
        load_weights(save(tmp_path, **{k: v for k, v in values.items() if v is not None}), "model", model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_buffer_may_hold_infinity_and_nan_in_one_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.full((3, 3), float("-inf")).triu(1)
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.zeros(3, 3))
    values = dict(model.state_dict()) | {"mask": mask}
    load_weights(save(tmp_path, **values), "model", model)
    assert torch.equal(model.mask, mask)
    assert not caplog.text
    load_weights(save(tmp_path, **values | {"running_var": torch.tensor([1.0, float("nan")])}), "model", model)
    assert model.running_var is not None
    assert model.running_var.isnan().any()
    assert "the buffer running_var contains NaN: a batch norm keeps it" in caplog.text
    assert "diverged" not in caplog.text


def test_an_average_that_no_manifest_lists_is_none(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    save_file({"x": torch.ones(1)}, path / "ema.safetensors")
    assert not has_ema(path)
    assert best_stem(path) == "model"
    assert has_ema(make(tmp_path, 8, more="ema.safetensors"))
    # Of an export, and beside the manifest of another program.
    (path / "manifest.json").write_text("{}")
    elsewhere = path.rename(tmp_path / "out")
    assert has_ema(elsewhere)
    (elsewhere / "manifest.json").unlink()
    assert best_stem(elsewhere) == "ema"


def test_the_message_names_the_directory_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the weights do not fit this model") as error:
        load_weights(save(tmp_path, other=torch.ones(1)), "model", nn.Linear(1, 1))
    assert str(tmp_path) in str(error.value)
    assert "give the model options" in str(error.value)
