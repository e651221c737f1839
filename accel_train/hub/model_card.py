"""The model card of a pushed checkpoint: what it is, its figures, curve and samples, and how to load it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from accel_train.store import strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import EVALUATION_FILE, REPORT

TEXT_LINES = 60
"""Lines of each text of the report shown in the card; the file itself is pushed whole."""


def build_card(
    checkpoint: Checkpoint, texts: Mapping[str, bytes], repo_id: str, revision: str, loads_with: str | None = None
) -> str:
    """The text of README.md, front matter and all. ``texts`` are the run's files that are pushed beside it, of which
    every picture and Markdown text of the report is shown; ``loads_with`` is the ``module.Class`` to load it with.

    Never raises: what is missing or cannot be read is left out. No licence is named, because none is known; the Hub
    lets the owner add one.
    """
    metrics = _figures(checkpoint, texts)
    parts = [_front_matter(metrics, repo_id), f"# {repo_id.split('/')[-1]}", _summary(checkpoint, texts)]
    for title, section in (
        ("Figures", _table(("Metric", "Value"), {name: f"{value:.6g}" for name, value in metrics.items()})),
        *((_title(name), f"![{_title(name)}]({name})") for name in _of_report(texts, ".png")),
        *((_title(name), _beginning(name, texts[name])) for name in _of_report(texts, ".md")),
        ("How to load", _loading(checkpoint, repo_id, revision, loads_with)),
        ("Options", _options(checkpoint)),
    ):
        if section:
            parts.append(f"## {title}\n\n{section}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(metrics: Mapping[str, float], repo_id: str) -> str:
    """YAML between two rules, written by ``huggingface_hub``; a model index only where there are figures."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="other",
            dataset_type="held-out",
            dataset_name="held-out data of the run",
            metric_type=name,
            metric_value=value,
        )
        for name, value in metrics.items()
    ]
    data = ModelCardData(
        library_name="accel_train",
        tags=["accel_train", "pytorch", "safetensors"],
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _figures(checkpoint: Checkpoint, texts: Mapping[str, bytes]) -> dict[str, float]:
    """The manifest's figures; else those of evaluation.json if they are of this step."""
    found: Any = checkpoint.manifest.get("metrics")
    if not found:
        found = _json(texts.get(f"{REPORT}/{EVALUATION_FILE}"))
        found = found if found.get("step") == checkpoint.step else {}
    return {
        str(name): float(value)
        for name, value in (found.items() if isinstance(found, Mapping) else ())
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _summary(checkpoint: Checkpoint, texts: Mapping[str, bytes]) -> str:
    manifest = checkpoint.manifest
    pushed = _json(texts.get("manifest.json")) or manifest
    files: Any = pushed.get("files") or {}
    has_state = any(str(name).startswith("optimizer/") for name in files)
    rows = {
        "Step": checkpoint.step,
        "Samples seen": manifest.get("samples_seen"),
        "Epoch": manifest.get("epoch"),
        "Run": manifest.get("run_id"),
        "Written": manifest.get("written_at"),
        "Optimizer state": "included: training can go on from it" if has_state else "not included",
        "accel_train": manifest.get("accel_train"),
    }
    text = "A checkpoint written by accel_train during training. `manifest.json` holds the sha256 of every file."
    return f"{text}\n\n{_table(('', ''), {k: v for k, v in rows.items() if v is not None})}"


def _of_report(texts: Mapping[str, bytes], ending: str) -> list[str]:
    return [name for name in texts if name.startswith(f"{REPORT}/") and name.endswith(ending)]


def _title(name: str) -> str:
    return PurePosixPath(name).stem.replace("_", " ").capitalize()


def _beginning(name: str, content: bytes) -> str:
    lines = content.decode("utf-8", errors="replace").splitlines()
    shown = "\n".join(f"##{line}" if line.startswith("#") else line for line in lines[:TEXT_LINES])
    return shown if len(lines) <= TEXT_LINES else f"{shown}\n\nMore in [{PurePosixPath(name).name}]({name})."


def _loading(checkpoint: Checkpoint, repo_id: str, revision: str, loads_with: str | None) -> str:
    """Code for the class that the recipe declared, and for plain safetensors in any case."""
    files: Any = checkpoint.manifest.get("files") or {}
    parts: list[str] = []
    if loads_with is not None:
        module, _, name = loads_with.rpartition(".")
        parts.append(
            f"```python\nfrom {module} import {name}\n\n"
            f'model = {name}.from_pretrained("{repo_id}", revision="{revision}")\n```'
        )
    weights = sorted(str(n) for n in files if str(n).startswith("model") and str(n).endswith(".safetensors"))
    if weights:
        names = ", ".join(f'"{name}"' for name in weights)
        parts.append(
            "With safetensors alone:\n\n```python\nfrom huggingface_hub import hf_hub_download\n"
            "from safetensors.torch import load_file\n\nweights = {}\n"
            f"for name in [{names}]:\n"
            f'    weights |= load_file(hf_hub_download("{repo_id}", name, revision="{revision}"))\n```'
        )
    if any(str(name).startswith("ema") for name in files):
        parts.append("`ema*.safetensors` holds the averaged weights under the same names.")
    return "\n\n".join(parts)


def _options(checkpoint: Checkpoint) -> str:
    options: Any = checkpoint.manifest.get("experiment")
    if not isinstance(options, Mapping) or not options:
        return ""
    table = _table(("Option", "Value"), {f"`{key}`": f"`{value}`" for key, value in options.items()})
    return f"<details>\n<summary>All options of the run</summary>\n\n{table}\n\n</details>"


def _table(head: tuple[str, str], rows: Mapping[Any, Any]) -> str:
    """A Markdown table, empty without rows. A bar or a line break in a value would end its cell."""
    if not rows:
        return ""
    lines = [f"| {key} | {' '.join(str(value).split()).replace('|', chr(92) + '|')} |" for key, value in rows.items()]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def _json(content: bytes | None) -> dict[str, Any]:
    try:
        value: Any = strict_json.parse(content or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
