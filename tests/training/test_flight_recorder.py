"""torch's flight recorder: variables, words, and what is asked of NCCL's, which a CPU does not have."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.launch_files.flight_recorder import set_up
from accel_train.training.health import flight_recorder


def entry(number: int, name: str, *, retired: bool, state: str = "scheduled") -> dict[str, Any]:
    """As torch 2.13 writes it."""
    return {
        "record_id": number,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "retired": retired,
        "state": state,
        "input_dtypes": ["Float"],
        "input_sizes": [[16, 2]],
    }


def test_unfinished_collectives_in_words() -> None:
    done = [entry(0, "nccl:all_reduce", retired=True, state="completed"), entry(1, "nccl:broadcast", retired=True)]
    words = flight_recorder.in_words
    assert words({}) == words({"entries": []}) == ["no collective yet"]
    last = "none unfinished; the last was nccl:broadcast number 2 of default_pg (Float [16, 2])"
    assert words({"entries": done[::-1]}) == [last]
    open_ones = [entry(n, "nccl:all_gather", retired=False, state="started") for n in range(2, 8)]
    open_ones[0]["process_group"] = ["3", "undefined"]
    told = words({"entries": [*done, entry(9, "nccl:late", retired=False, state="completed"), *open_ones]})
    assert told[0] == "waits in nccl:all_gather number 3 of group 3 (Float [16, 2])"
    assert len(told) == 3


def test_variables_that_the_user_has_set_stay(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    set_up(tmp_path, environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder_",
    }
    own = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "x",
    }
    before = dict(own)
    set_up(tmp_path, own)
    assert own == before


def test_nccl_is_asked_for_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = importlib.import_module("torch._C._distributed_c10d")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(extension, "_dump_nccl_trace", lambda: b"pickled", raising=False)
    trace = json.dumps({"entries": [entry(4, "nccl:all_reduce", retired=False)]}).encode()
    monkeypatch.setattr(extension, "_dump_nccl_trace_json", lambda: trace, raising=False)
    assert flight_recorder.dump(tmp_path, 5) == ["waits in nccl:all_reduce number 5 of default_pg (Float [16, 2])"]
    assert (tmp_path / "flight_recorder_5").read_bytes() == b"pickled"
    assert flight_recorder.how_to_read(tmp_path).endswith(f"torchfrtrace --prefix flight_recorder_ {tmp_path}")


def test_one_process_has_no_collectives(tmp_path: Path) -> None:
    assert flight_recorder.dump(tmp_path, 0) is None
    assert not list(tmp_path.iterdir())
