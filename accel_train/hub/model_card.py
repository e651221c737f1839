"""Model card of a pushed checkpoint: summary, metrics, report of the run, and code for using it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from accel_train.store import strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import EVALUATION_FILE, REPORT
from accel_train.store.strict_json import Json

TEXT_LINES = 60
"""Longest excerpt of a text of the report in the card. The file itself is pushed whole."""


@dataclass(frozen=True)
class CardFacts:
    """Facts for the card beside the checkpoint and its report."""

    repo_id: str
    revision: str
    """Branch or tag of the push."""
    loads_with: str | None = None
    """``module.Class`` with a ``from_pretrained``."""
    license: str = ""
    command: str | None = None
    """Training command, secrets hidden."""


def build_card(checkpoint: Checkpoint, texts: Mapping[str, bytes], facts: CardFacts, description: Any = None) -> str:
    """Build the text of README.md with its front matter.

    ``texts`` are the other files of the push. The card shows the pictures and Markdown texts of the report
    among them, but not those of single steps. ``description`` is config.json. Its ``card`` has the recipe's entries for
    this page: ``pipeline_tag``, ``datasets``, ``base_model``, ``measured_on`` and ``usage``. Never raises: unreadable
    parts are left out.
    """
    described: Mapping[str, Any] = description if isinstance(description, Mapping) else {}
    card: Any = described.get("card")
    about: Mapping[str, Any] = card if isinstance(card, Mapping) else {}
    metrics = _metrics(checkpoint, texts)
    rounded = {name: f"{value:.6g}" for name, value in metrics.items()}
    sections = [("Figures", _table(("Metric", "Value"), rounded))]
    sections += [(_title(name), f"![{_title(name)}]({name})") for name in _report_files(texts, ".png")]
    for name in _report_files(texts, ".md"):
        beginning = _beginning(name, texts[name])
        sections.append((_title(name), beginning))
    sections.append(("How to use", _usage(described, about, facts)))
    sections.append(("How to load", _loading(checkpoint, facts)))
    sections.append(("How it was trained", f"```bash\n{facts.command}\n```" if facts.command else ""))
    sections.append(("Options", _options(checkpoint)))

    name = facts.repo_id.split("/")[-1]
    parts = [_front_matter(metrics, facts, about), f"# {name}", _summary(checkpoint, texts)]
    parts += [f"## {title}\n\n{section}" for title, section in sections if section]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(metrics: Mapping[str, float], facts: CardFacts, about: Mapping[str, Any]) -> str:
    """Return YAML between two rules, written by ``huggingface_hub``."""
    from huggingface_hub import EvalResult, ModelCardData

    # A model index lists results and needs a name. Without metrics the card has no model index.
    model_name = None
    if metrics:
        model_name = facts.repo_id.split("/")[-1]
    results = [
        EvalResult(
            task_type=_text(about, "pipeline_tag") or "other",
            dataset_type="held-out",
            dataset_name=_text(about, "measured_on") or "held-out data of the run",
            metric_type=name,
            metric_value=value,
        )
        for name, value in metrics.items()
    ]
    data = ModelCardData(
        library_name="accel_train",
        tags=["accel_train", "pytorch", "safetensors"],
        license=facts.license or None,
        pipeline_tag=_text(about, "pipeline_tag"),
        datasets=_texts(about, "datasets"),
        base_model=_text(about, "base_model"),
        metrics=sorted(metrics) or None,
        model_name=model_name,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _text(about: Mapping[str, Any], key: str) -> str | None:
    value = about.get(key)
    return value if isinstance(value, str) and value else None


def _texts(about: Mapping[str, Any], key: str) -> list[str] | None:
    value: Any = about.get(key)
    if not isinstance(value, (list, tuple)):
        return None
    return [name for name in cast("list[Any]", value) if isinstance(name, str)] or None


def _usage(described: Mapping[str, Any], about: Mapping[str, Any], facts: CardFacts) -> str:
    """Return the lines to load the recipe's pipeline, for a model of this package."""
    named = described.get("pipeline")
    if not isinstance(named, str) or not named.startswith("accel_train."):
        return ""
    # By revision, because main moves on with the next push.
    lines = ["from accel_train import load", f'pipeline = load("hub:{facts.repo_id}@{facts.revision}")']
    usage = _text(about, "usage")
    if usage is not None:
        lines.append(usage)
    return "```python\n" + "\n".join(lines) + "\n```"


def _metrics(checkpoint: Checkpoint, texts: Mapping[str, bytes]) -> dict[str, float]:
    """Return the finite metrics of the manifest, else those of evaluation.json if it belongs to this step."""
    metrics: Any = checkpoint.manifest.get("metrics")
    if not metrics:
        metrics = _json(texts.get(f"{REPORT}/{EVALUATION_FILE}"))
        # The report is of the run, which may have been evaluated again since.
        if metrics.get("step") != checkpoint.step:
            return {}
    if not isinstance(metrics, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _summary(checkpoint: Checkpoint, texts: Mapping[str, bytes]) -> str:
    manifest = checkpoint.manifest
    # The pushed manifest lists fewer files than the local one if the state stays here.
    pushed = _json(texts.get("manifest.json")) or manifest
    files: Any = pushed.get("files") or {}
    state = "not included"
    if any(str(name).startswith("optimizer/") for name in files):
        state = "included: training can resume from it"
    rows = {
        "Step": checkpoint.step,
        "Samples seen": manifest.get("samples_seen"),
        "Epoch": manifest.get("epoch"),
        "Run": manifest.get("run_id"),
        "Written": manifest.get("written_at"),
        "Optimizer state": state,
        "accel_train": manifest.get("accel_train"),
    }
    text = "A checkpoint written by accel_train during training. `manifest.json` holds the sha256 of every file."
    known = {title: value for title, value in rows.items() if value is not None}
    return f"{text}\n\n{_table(('', ''), known)}"


def _report_files(texts: Mapping[str, bytes], ending: str) -> list[str]:
    # Those of single steps lie in folders below, and may be hundreds.
    return [name for name in texts if PurePosixPath(name).parent == PurePosixPath(REPORT) and name.endswith(ending)]


def _title(name: str) -> str:
    return PurePosixPath(name).stem.replace("_", " ").capitalize()


def _beginning(name: str, content: bytes) -> str:
    """Return the first lines of a Markdown text."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    # Headings of the text go two levels down, below the heading of their section.
    shown = "\n".join(re.sub(r"^#", "###", line) for line in lines[:TEXT_LINES])
    if len(lines) <= TEXT_LINES:
        return shown
    return f"{shown}\n\nMore in [{PurePosixPath(name).name}]({name})."


def _loading(checkpoint: Checkpoint, facts: CardFacts) -> str:
    """Return code to load with the recipe's class, if known, and with plain safetensors."""
    files: Any = checkpoint.manifest.get("files") or {}
    repo_id = facts.repo_id
    revision = facts.revision
    parts: list[str] = []
    if facts.loads_with is not None:
        module, _, name = facts.loads_with.rpartition(".")
        parts.append(
            f"```python\nfrom {module} import {name}\n\n"
            f'model = {name}.from_pretrained("{repo_id}", revision="{revision}")\n```'
        )
    names = sorted(str(file) for file in files)
    weights = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
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
    rows = {f"`{key}`": f"`{value}`" for key, value in options.items()}
    table = _table(("Option", "Value"), rows)
    return f"<details>\n<summary>All options of the run</summary>\n\n{table}\n\n</details>"


def _table(head: tuple[str, str], rows: Mapping[Any, Any]) -> str:
    """Return a Markdown table, or an empty text without rows."""
    if not rows:
        return ""
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    for key, value in rows.items():
        # A line break or a bar in a value would end its cell.
        cell = " ".join(str(value).split())
        cell = cell.replace("|", r"\|")
        lines.append(f"| {key} | {cell} |")
    return "\n".join(lines)


def _json(content: bytes | None) -> Json:
    try:
        value: Any = strict_json.parse(content or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
