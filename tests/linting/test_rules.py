"""Each rule finds something where it should, and nothing beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.experiment_options import FREE_TO_CHANGE
from accel_train.linting import reporting
from accel_train.linting.facts import MIB, Facts
from accel_train.linting.findings import Rule
from accel_train.linting.table import RULES, SUBJECTS, find_rule, ignored_names, lint
from accel_train.options.tree import option_names
from accel_train.store.run_file import is_covered
from recipes import causal_lm, lora, mmdit, pde
from tests import linting_page
from tests.linting.cases import (
    A100,
    BILLION,
    CASES,
    CLUSTER,
    CPU,
    DDP,
    EIGHT_WORKERS,
    FOUR_MICRO_BATCHES,
    FSDP2,
    GPU,
    HUB,
    ONE_MICRO_BATCH,
    RTX_4090,
    V100,
    given,
    on,
)

ROOT = Path(__file__).parents[2]
OPTIONS = {name for recipe in (causal_lm, lora, mmdit, pde) for name in option_names(recipe.Config)}
FREE = (*FREE_TO_CHANGE, "evaluation")
"""Options that a resume may change. ``evaluation`` is one of each recipe."""
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def test_names_are_stable_and_of_one_form() -> None:
    assert len(RULES) == sum(map(len, SUBJECTS.values())) >= 40
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in RULES)


def test_every_rule_has_its_facts() -> None:
    assert sorted(CASES) == sorted(RULES)


@every_rule
def test_a_rule_finds_something_and_nothing_beside_it(rule: Rule) -> None:
    fires, nearest = CASES[rule.name]
    finding = rule.find(fires)
    assert finding is not None
    assert rule.find(nearest) is None
    assert finding.option
    for text in (finding.reason, finding.remedy):
        assert len(text) > 5
        assert not text.endswith(".")
    assert len(rule.explanation) > 50
    assert rule.explanation.endswith(".")


@every_rule
def test_a_change_is_of_a_known_option_and_ends_the_finding(rule: Rule) -> None:
    fires, _ = CASES[rule.name]
    finding = rule.find(fires)
    assert finding is not None
    if finding.change is None:
        return
    option, value = finding.change
    assert option in OPTIONS
    # A resume with the changed file is no other experiment.
    assert is_covered(option, FREE)
    # --fix belongs to a check, which counts no model.
    assert rule.stage == "start"
    assert fires.options[option] != value
    changed = replace(fires, options={**fires.options, option: value})
    assert rule.find(changed) is None


def test_a_plain_machine_and_a_long_run_of_defaults_give_no_finding() -> None:
    for layout in (given().layout, DDP, FSDP2):
        found = lint(given(layout=layout))
        assert not found, reporting.describe(found)


@every_rule
def test_a_source_in_the_documentation_is_there(rule: Rule) -> None:
    for source in rule.source.split(", "):
        if source.startswith("docs/"):
            assert (ROOT / source).is_file()


def both(*facts: Facts) -> Facts:
    options = {name: value for each in facts for name, value in each.options.items() if value != given().option(name)}
    return given(options, DDP)


def test_errors_come_first_and_names_silence() -> None:
    facts = both(CASES["swapped-betas"][0], CASES["static-graph-with-accumulation"][0])
    assert [rule.name for rule, _ in lint(facts)] == ["static-graph-with-accumulation", "swapped-betas"]
    assert [rule.name for rule, _ in lint(facts, ["static-graph-with-accumulation"])] == ["swapped-betas"]
    assert lint(facts, stages=["data", "model"]) == []
    assert ignored_names({"ACCEL_TRAIN_IGNORE": " large-eps ,swapped-betas,"}, ["core-files"]) == [
        "large-eps",
        "swapped-betas",
        "core-files",
    ]
    with pytest.raises(
        UsageError, match=r"'large-ep': there is no such rule \(did you mean 'large-eps'\?\); .*ACCEL_TRAIN"
    ):
        ignored_names({"ACCEL_TRAIN_IGNORE": "large-ep"})


def test_a_rule_is_explained() -> None:
    text = reporting.explain(find_rule("sharding-without-need"))
    assert text.startswith("sharding-without-need (warning)\n  FSDP2 and ZeRO-3 gather the weights of each block")
    assert "\n  source: docs/machines.md\n  reported only at a start, once the model is counted\n" in text


def test_numbers_of_findings_are_those_of_the_facts() -> None:
    """Closed forms by hand: 20 bytes for each of a billion parameters, 17 threads on each of 4 processes,
    8 workers of each that read 2 micro-batches ahead."""
    sharding, _ = CASES["sharding-without-need"]
    (found,) = lint(sharding, stages=["model"])
    assert f"take {20e9 / 2**30:.1f} GiB, and a device has 80 GiB" in found.finding.reason
    threads, _ = CASES["threads-above-cores"]
    (found,) = lint(threads)
    assert "4 process(es) with 17 threads each make 68 threads on 64 core(s)" in found.finding.reason
    kept, _ = CASES["keep-every-between-saves"]
    (found,) = lint(kept)
    assert "every 300 steps, so the first one to be kept is at step 3000" in found.finding.reason
    assert found.finding.remedy == "give a multiple of 300, such as 900"
    between, _ = CASES["best-between-saves"]
    (found,) = lint(between)
    assert "only one of every 2 evaluations has a checkpoint" in found.finding.reason
    assert found.finding.remedy == "set evaluation.every to a multiple of checkpoints.save_every (100)"
    waiting = [found.finding.reason for found in lint(on(DDP, EIGHT_WORKERS, shared_memory_bytes=64 * MIB))]
    assert any("64 micro-batches wait in it" in reason for reason in waiting), waiting


BY_HAND = {"max_steps": "command line", "schedule.warmup_steps": "recipes/presets/base.yaml"}
GROUPED = replace(FSDP2, processes=16, machines=2)
CONDITIONS: list[tuple[str, Facts, bool]] = [
    # A start shortens the warm-up of a preset by itself.
    ("warmup-beyond-the-run", given({"schedule.warmup_steps": 10_001}, origins=BY_HAND), False),
    (
        "warmup-beyond-the-run",
        given({"schedule.warmup_steps": 10_001}, origins=dict.fromkeys(BY_HAND, "command line")),
        True,
    ),
    ("steps-without-learning-rate", given({"schedule.decay_steps": 10_000}), False),
    # 8 / sqrt(256) is a half, and 8 / 256 would be a thirty-second.
    ("scale-of-adapters", given({"lora.rank": 256, "lora.variant": "rslora", "lora.alpha": 8.0}), False),
    ("many-passes", given({"global_batch_size": 64, "data.packing": True, "lora.rank": 16}, dataset_size=100), False),
    (
        "cuda-graphs-with-accumulation",
        given({**FOUR_MICRO_BATCHES, "compile.mode": "off", "compile.optimize": "reduce-overhead"}, GPU),
        False,
    ),
    # Saves by one interval within the run are enough.
    (
        "no-save-before-the-end",
        given({"checkpoints.save_every": 10_001, "checkpoints.save_every_epochs": 1.0}),
        False,
    ),
    (
        "no-epoch-before-the-end",
        given(
            {"global_batch_size": 64, "checkpoints.save_every_epochs": 6.5, "checkpoints.save_every": 10_000},
            dataset_size=100_000,
        ),
        False,
    ),
    (
        "no-epoch-before-the-end",
        given(
            {"global_batch_size": 64, "checkpoints.save_every_epochs": 6.5, "checkpoints.save_every": 10_001},
            dataset_size=100_000,
        ),
        True,
    ),
    ("one-checkpoint", given({"checkpoints.keep_last": 1, "checkpoints.keep_window_steps": 500}), False),
    ("best-of-one-evaluation", given({**HUB, "hub.push": "best", "evaluation.every": 0}), True),
    ("many-revisions", given({**HUB, "checkpoints.save_every": 49, "hub.push_every": 2}), False),
    ("many-revisions", given({**HUB, "checkpoints.save_every": 49, "hub.push": "best"}), False),
    # What one machine has is compared with its own processes.
    ("workers-above-cores", given(EIGHT_WORKERS, CLUSTER), False),
    # 300 seconds by default.
    ("loader-timeout-above-collective", given({**EIGHT_WORKERS, "collective_timeout_seconds": 300}, DDP), True),
    ("loader-timeout-above-collective", given({**EIGHT_WORKERS, "collective_timeout_seconds": 301}, DDP), False),
    ("host-memory-of-offload", given(layout=replace(GROUPED, offload=True), parameters=18 * BILLION), False),
    # 279 GiB of state: more than 40 % of the 8 devices of a machine, and less than that of all 16.
    ("shards-across-machines", given(layout=GROUPED, parameters=15 * BILLION), False),
    ("time-limit-before-save", on(CPU, {"checkpoints.save_every_minutes": 20.0}, seconds_left=1200.0), True),
    ("time-limit-before-save", on(CPU, {"checkpoints.save_every_minutes": 0.0}, seconds_left=6000.0), True),
    ("time-limit-before-save", on(CPU, {"checkpoints.save_every_epochs": 1.0}, seconds_left=60.0), False),
    ("fp16-beside-bf16", on(replace(DDP, processes=2), {"precision": "fp16"}, devices=(A100, V100)), False),
    # Of 20 bytes for each parameter: 9.3 and 11.2 GiB, whose update is divided by all processes.
    ("sharding-without-need", given(ONE_MICRO_BATCH, FSDP2, parameters=BILLION // 2), True),
    ("sharding-without-need", given(ONE_MICRO_BATCH, FSDP2, parameters=BILLION * 6 // 10), False),
    # The smallest device decides, and one without a process is not waited for.
    ("sharding-without-need", replace(on(FSDP2, devices=(A100, A100, A100, RTX_4090)), parameters=BILLION), False),
    ("unequal-devices", on(replace(DDP, processes=2), devices=(A100, A100, V100)), False),
]
"""Conditions of a rule besides that of `CASES`, and whether it finds something."""


@pytest.mark.parametrize(("name", "facts", "found"), CONDITIONS, ids=[name for name, _, _ in CONDITIONS])
def test_each_condition_of_a_rule_counts(name: str, facts: Facts, found: bool) -> None:
    assert (find_rule(name).find(facts) is not None) == found


def test_remedies_are_those_of_the_facts() -> None:
    idle = find_rule("idle-devices").find(on(replace(DDP, processes=8, machines=2), devices=(A100,) * 8))
    assert idle is not None
    assert idle.remedy.startswith("give --num_processes 16,")
    # 512 samples cost a third of ten times as many that are trained on, 64 in a step.
    outweighs = find_rule("evaluation-outweighs-training").find(CASES["evaluation-outweighs-training"][0])
    assert outweighs is not None
    assert outweighs.change == ("evaluation.every", 80)
    kept = find_rule("keep-every-between-saves").find(
        given({"checkpoints.keep_every": 100, "checkpoints.save_every": 300})
    )
    assert kept is not None
    assert kept.remedy.endswith("such as 300")
    best = find_rule("best-of-one-evaluation").find(given({"checkpoints.keep_best": 1, "evaluation.every": 0}))
    assert best is not None
    assert best.change is None


def test_the_page_has_every_rule() -> None:
    text = linting_page.PAGE.read_text(encoding="utf-8")
    assert text == linting_page.page(), "run python -m tests.linting_page"
    assert all(f"| `{name}` |" in text for name in RULES)


SCHEDULE = {"global_batch_size": 64, "batch_schedule.steps": (5000,), "batch_schedule.sizes": (32,)}


def test_samples_are_those_of_the_batch_schedule() -> None:
    """48 samples a step on average, over 10,000 steps."""
    assert given(SCHEDULE).samples_per_step == 48
    passes = {**SCHEDULE, "data.packing": True}
    assert find_rule("many-passes").find(given(passes, dataset_size=4799))
    assert not find_rule("many-passes").find(given(passes, dataset_size=4800))


def test_steps_of_epochs_are_those_of_the_batch_schedule() -> None:
    # 5,000 steps of 64 samples, and 32 in each of the others.
    epochs = {**SCHEDULE, "max_steps": None, "max_epochs": 1.0}
    assert given(epochs, dataset_size=320_000 + 32 * 1000 + 1).steps == 6001


def test_micro_batches_are_those_of_the_largest_step() -> None:
    assert given({**SCHEDULE, "micro_batch_size": 64}).accumulation == 1
    assert given({**SCHEDULE, "micro_batch_size": 64, "batch_schedule.sizes": (65,)}).accumulation == 2
    # The process with the larger share, 33 of 65.
    two = {**SCHEDULE, "micro_batch_size": 32, "batch_schedule.sizes": (65,)}
    assert given(two, replace(DDP, processes=2)).accumulation == 2


def test_automatic_workers_divide_the_cores_of_a_machine() -> None:
    assert given({"loader.num_workers": "auto"}, CLUSTER).workers == 64 // 8 - 1
