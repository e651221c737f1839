"""Model card of a pushed checkpoint: summary, metrics, report of the run, and code for using it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

from accel_train.metrics.panels import is_count
from accel_train.metrics.progress import Labels
from accel_train.metrics.tracking.report_files import NOT_OF_AN_EVALUATION
from accel_train.pipeline import PLACE
from accel_train.store import strict_json
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import EVALUATION_FILE, REPORT, STEP
from accel_train.store.strict_json import Json

TEXT_LINES = 60
"""Longest excerpt of a text of the report in the card. The file itself is pushed whole."""
FOLDERS = re.compile(r"(?<!\S)~?/\S*/(?=[^/\s])")
"""The folders of an absolute path within a sentence."""


@dataclass(frozen=True)
class CardFacts:
    """Facts for the card in addition to the checkpoint and its report."""

    repo_id: str
    revision: str
    """Branch or tag of the push."""
    loads_with: str | None = None
    """``module.Class`` with a ``from_pretrained``."""
    license: str = ""
    command: str | None = None
    """Training command, secrets hidden."""
    labels: Labels = field(default_factory=Labels)
    """Labels of the metrics, which tell those of baselines."""
    others: Sequence[str] = ()
    """Files of adapters for other programs in the push."""


def build_card(checkpoint: Checkpoint, texts: Mapping[str, bytes], facts: CardFacts, description: Any = None) -> str:
    """Build the text of README.md with its front matter.

    ``texts`` are the other files of the push. The card shows the pictures and Markdown texts of the report
    among them: those of this step, else the last ones under their own step. ``description`` is config.json. Its
    ``card`` has the recipe's entries for this page: ``pipeline_tag``, ``datasets``, ``base_model``, ``measured_on``,
    ``usage`` and ``other_programs``. Never raises: unreadable parts are left out.
    """
    described: Mapping[str, Any] = description if isinstance(description, Mapping) else {}
    card: Any = described.get("card")
    about: Mapping[str, Any] = card if isinstance(card, Mapping) else {}
    metrics = _metrics(checkpoint, texts)
    sections = [("Figures", _figures(metrics, facts.labels))]
    for title, name in _report_files(texts, ".png", checkpoint.step):
        sections.append((title, f"![{title}]({name})"))
    for title, name in _report_files(texts, ".md", checkpoint.step):
        sections.append((title, _excerpt(name, texts[name])))
    sections.append(("How to use", _usage(described, about, facts)))
    sections.append(("How to load", _loading(checkpoint, about, facts)))
    sections.append(("How it was trained", _command(facts.command)))
    sections.append(("Options", _options(checkpoint)))

    name = facts.repo_id.split("/")[-1]
    results = {name: value for name, value in metrics.items() if not (facts.labels.is_baseline(name) or is_count(name))}
    parts = [_front_matter(results, facts, about), f"# {name}", _summary(checkpoint, texts)]
    parts += [f"## {title}\n\n{section}" for title, section in sections if section]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figures(metrics: Mapping[str, float], labels: Labels) -> str:
    rows: dict[str, str] = {}
    for name, value in metrics.items():
        mark = " (baseline)" * labels.is_baseline(name)
        rows[name + mark] = f"{value:.6g}"
    return _table(("Metric", "Value"), rows)


def _front_matter(metrics: Mapping[str, float], facts: CardFacts, about: Mapping[str, Any]) -> str:
    """Return YAML between two rules, written by ``huggingface_hub``. ``metrics`` are those of the model itself."""
    from huggingface_hub import EvalResult, ModelCardData

    # A model index lists results and needs a name. Without metrics the card has no model index.
    model_name = None
    if metrics:
        model_name = facts.repo_id.split("/")[-1]
    results = [
        EvalResult(
            task_type=_text(about, "pipeline_tag") or "other",
            dataset_type="held-out",
            dataset_name=FOLDERS.sub("", _text(about, "measured_on") or "held-out data of the run"),
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
    """Return code that loads the recipe's pipeline, empty unless it is one of this package."""
    named = described.get("pipeline")
    if not isinstance(named, str) or not named.startswith("accel_train."):
        return ""
    # By revision, because main moves on with the next push.
    lines = ["from accel_train import load", f'pipeline = load("hub:{facts.repo_id}@{facts.revision}")']
    usage = _text(about, "usage")
    if usage is not None:
        lines.append(usage)
    return _python(lines)


def _metrics(checkpoint: Checkpoint, texts: Mapping[str, bytes]) -> dict[str, float]:
    """Return the finite metrics of the manifest, else those of evaluation.json if it belongs to this step."""
    metrics: Any = checkpoint.manifest.get("metrics")
    if not metrics:
        metrics = _json(texts.get(f"{REPORT}/{EVALUATION_FILE}"))
        # The report belongs to the run, which may have been evaluated again since.
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
        "Epoch": _rounded(manifest.get("epoch")),
        "Run": manifest.get("run_id"),
        "Written": manifest.get("written_at"),
        "Optimizer state": state,
        "accel_train": manifest.get("accel_train"),
    }
    text = "A checkpoint written by accel_train during training. `manifest.json` holds the sha256 of every file."
    known = {title: value for title, value in rows.items() if value is not None}
    return f"{text}\n\n{_table(('', ''), known)}"


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _report_files(texts: Mapping[str, bytes], ending: str, step: int) -> list[tuple[str, str]]:
    """Return title and name of the files to show. The run, and its report, may have continued after ``step``."""
    found: list[tuple[str, str]] = []
    for name in texts:
        path = PurePosixPath(name)
        if path.parent != PurePosixPath(REPORT) or path.suffix != ending:
            continue
        pages = _by_step(texts, path)
        shown = max(pages, default=_evaluated_step(texts))
        if path.name in NOT_OF_AN_EVALUATION or shown == step:
            found.append((_title(name), name))
        elif step in pages:
            found.append((_title(name), pages[step]))
        elif shown is not None:
            found.append((f"{_title(name)} of the run at step {shown:,}", name))
    return found


def _by_step(texts: Mapping[str, bytes], path: PurePosixPath) -> dict[int, str]:
    """Return the pages or pictures of single evaluations by step, from the folder with the name of ``path``."""
    pages: dict[int, str] = {}
    for name in texts:
        other = PurePosixPath(name)
        number = other.stem.removeprefix(STEP)
        if other.parent == path.with_suffix("") and other.suffix == path.suffix and number.isdecimal():
            pages[int(number)] = name
    return pages


def _evaluated_step(texts: Mapping[str, bytes]) -> int | None:
    """Return the step of the last evaluation, which wrote the report, or None."""
    step = _json(texts.get(f"{REPORT}/{EVALUATION_FILE}")).get("step")
    return step if isinstance(step, int) else None


def _title(name: str) -> str:
    return PurePosixPath(name).stem.replace("_", " ").capitalize()


def _excerpt(name: str, content: bytes) -> str:
    """Return the first lines of a Markdown text."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    # Headings of the text go two levels down, below the heading of their section.
    shown = "\n".join(re.sub(r"^#", "###", line) for line in lines[:TEXT_LINES])
    if len(lines) <= TEXT_LINES:
        return shown
    return f"{shown}\n\nMore in [{PurePosixPath(name).name}]({name})."


def _loading(checkpoint: Checkpoint, about: Mapping[str, Any], facts: CardFacts) -> str:
    """Return code to load with the recipe's class, if known, with other programs, and with plain safetensors."""
    files: Any = checkpoint.manifest.get("files") or {}
    weights = _weights(files, "model")
    averaged = _weights(files, "ema")
    where = f'"{facts.repo_id}"'
    revision = f'revision="{facts.revision}"'
    parts: list[str] = []
    if averaged:
        parts.append(f"The figures are of the EMA weights, {', '.join(f'`{name}`' for name in averaged)}.")
    reading = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", ""]
    ema = [f"for name in {_listed(averaged)}:", f"    file = hf_hub_download({where}, name, {revision})"]
    # Frozen weights and buffers have no average.
    ema.append("    model.load_state_dict(load_file(file), strict=False)")
    if facts.loads_with is not None:
        module, _, name = facts.loads_with.rpartition(".")
        lines = [f"from {module} import {name}", "", f"model = {name}.from_pretrained({where}, {revision})"]
        parts.append(_python([*reading[:2], *lines, *ema] if averaged else lines))
    more = [*reading, *ema] if averaged else []
    parts += [_with_program(program, facts, more) for program in _programs(about)]
    if weights:
        # The EMA comes last, because it replaces the trained weights of the same names.
        lines = [*reading, "weights = {}", f"for name in {_listed([*weights, *averaged])}:"]
        lines.append(f"    weights |= load_file(hf_hub_download({where}, name, {revision}))")
        parts.append(f"With safetensors alone:\n\n{_python(lines)}")
    return "\n\n".join(parts)


def _programs(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the recipe's code for other programs: ``program``, ``code``, and ``needs``, a file of an export."""
    value: Any = about.get("other_programs")
    found: list[Any] = list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else []
    return [each for each in found if isinstance(each, Mapping) and _text(each, "program") and _text(each, "code")]


def _with_program(program: Mapping[str, Any], facts: CardFacts, ema: Sequence[str]) -> str:
    """Return one program's code. ``ema`` are lines that put the EMA weights into its ``model``."""
    name, code, needs = (str(program.get(key) or "") for key in ("program", "code", "needs"))
    place = f'"{facts.repo_id}", revision="{facts.revision}"'
    if not needs:
        shown = f"With {name}:\n\n{_python([code.replace(PLACE, place)])}"
        if not ema:
            return shown
        return f"{shown}\n\nThese are the trained weights. For the EMA weights, continue with:\n\n{_python(ema)}"
    if needs in facts.others:
        return f"With {name}, from `{needs}`:\n\n{_python([code.replace(PLACE, place)])}"
    fetch = f"hf download {facts.repo_id} --revision {facts.revision} --local-dir downloaded"
    return (
        f"**{name} cannot load this repository as it is**: it has no `{needs}`. Write that file first:\n\n"
        f"```bash\n{fetch}\naccel-train export downloaded exported\n```\n\n"
        + _python([code.replace(PLACE, '"exported"')])
    )


def _command(command: str | None) -> str:
    """Return the training command, without folders of the machine of the training."""
    try:
        script, *rest = shlex.split(command or "")
    except ValueError:
        return ""
    path = PurePosixPath(script)
    if path.is_absolute():
        path = PurePosixPath(path.parent.name, path.name)
    words = ["python", str(path)] if path.suffix == ".py" else [path.name]
    for word in rest:
        flag, separator, value = word.partition("=") if word.startswith("-") else ("", "", word)
        words.append(flag + separator + _without_folders(value))
    return f"```bash\n{shlex.join(words)}\n```"


def _without_folders(value: Any) -> Any:
    """Return an option's value with the last part of each absolute path: the rest says nothing on another machine."""
    if isinstance(value, (list, tuple)):
        return [_without_folders(each) for each in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {key: _without_folders(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if not isinstance(value, str) or not value.startswith(("/", "~/")):
        return value
    return PurePosixPath(value).name or value


def _weights(files: Mapping[str, Any], stem: str) -> list[str]:
    """List the weight files of a collection. A large model has several."""
    return sorted(name for name in map(str, files) if name.startswith(stem) and name.endswith(".safetensors"))


def _listed(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _python(lines: Sequence[str]) -> str:
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _options(checkpoint: Checkpoint) -> str:
    options: Any = checkpoint.manifest.get("experiment")
    if not isinstance(options, Mapping) or not options:
        return ""
    rows = {f"`{key}`": f"`{_without_folders(value)}`" for key, value in options.items()}
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
