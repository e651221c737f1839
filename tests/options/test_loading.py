"""From a preset or file and flags to one config, and where each value came from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from accel_train.config import (
    Fraction,
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    UsageError,
    expand_path,
)
from accel_train.domains.images.pipeline import PictureOptions
from accel_train.domains.language.generation.asked import LanguageOptions
from accel_train.experiment_options import Recipe
from accel_train.options.loading import Loaded, load_config, read_options
from accel_train.options.tree import config_text, flatten, option_names, to_tree
from accel_train.store.run_file import write_config

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Inner:
    """A group inside a group."""

    rate: Fraction = 0.5
    """From 0 to 1."""


@dataclass(frozen=True)
class Group:
    """A group."""

    lr: PositiveFloat = 1e-3
    """Learning rate."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """Two decays."""
    fused: Literal["auto", True, False] = "auto"
    """Or a choice."""
    biased: bool = True
    """Yes or no."""
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.betas[0] > self.betas[1]:
            raise UsageError(f"betas {self.betas}: the first must not be above the second; swap them")


@dataclass(frozen=True)
class Config:
    """An experiment."""

    seed: Seed = 0
    """Seed."""
    steps: PositiveInt | None = None
    """How many."""
    every: NonNegativeInt = 0
    """How often."""
    name: str | None = None
    """A name, or none."""
    verbose: bool = False
    """Say more."""
    tags: tuple[str, ...] = ()
    """Any words."""
    resume: Literal["auto", "never"] = "auto"
    """Of this call."""
    optimizer: Group = field(default_factory=Group)


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "demo.yaml").write_text("steps: 10\noptimizer: {lr: 1e-4, inner: {rate: 1}}\n")
    (folder / "large.yaml").write_text("steps: 1000\ntags: [a, b]\n")
    return folder


def load(presets: Path, *argv: str) -> Loaded[Config]:
    return load_config(Config, argv, presets=presets)


def test_a_notebook_may_give_numbers_and_paths(presets: Path) -> None:
    argv = [presets / "demo.yaml", "--steps", 5, "--optimizer.lr", 2.5e-4, "--verbose", True, "--name", presets]
    found = load_config(Config, argv, presets=presets)
    config = found.config
    assert (config.steps, config.optimizer.lr, config.verbose, config.name) == (5, 2.5e-4, True, str(presets))
    assert found.origins["steps"] == "command line"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["demo", "--steps", None],
            r"argument 3 behind --steps is None of type NoneType: text, a number, .*a path is req",
        ),
        (
            ["--optimizer.betas", (0.9, 0.95)],
            r"argument 2 behind --optimizer.betas is \(0\.9, 0\.95\) of type tuple: text",
        ),
        ([["demo"]], r"argument 1 is \['demo'\] of type list: "),
        ("demo", r"'demo': one string is given, and a list of words is required, as in main\(\['--max_steps', '5'\]\)"),
    ],
)
def test_what_no_command_line_has_is_refused_by_name(presets: Path, argv: Sequence[object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(Config, argv, presets=presets)


@dataclass(frozen=True)
class Declaring(Config):
    """A recipe that declares what a resume may change."""

    recipe: ClassVar = Recipe()


def test_what_a_recipe_declares_as_free_must_be_an_option(presets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Declaring, "recipe", Recipe(free_to_change=("optimizer", "optimizer.inner", "tags")))
    load_config(Declaring, [], presets=presets)
    monkeypatch.setattr(Declaring, "recipe", Recipe(free_to_change=("tags", "optimizers")))
    with pytest.raises(
        UsageError, match=r"'optimizers' is neither an option of Declaring .* \(did you mean 'optimizer"
    ):
        load_config(Declaring, [], presets=presets)


@pytest.mark.parametrize("smoke", [{"optimizer.lrr": 1.0}, lambda config: {"optimizer.lrr": 1.0}])
def test_what_a_recipe_declares_for_smoke_must_be_an_option(
    smoke: Any, presets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Declaring, "recipe", Recipe(smoke=smoke))
    monkeypatch.setattr(Declaring, "smoke_values", lambda self, flags: {"tags": [], **smoke(self)}, raising=False)
    argv = ["--smoke"] if callable(smoke) else []
    with pytest.raises(
        UsageError, match=r"smoke: 'optimizer.lrr' is no option of Declaring \(did you mean 'optimizer.lr'"
    ):
        load_config(Declaring, argv, presets=presets)


def test_a_tuple_without_its_comma_is_told_so(presets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: Any = "tags"
    monkeypatch.setattr(Declaring, "recipe", Recipe(free_to_change=words))
    with pytest.raises(UsageError, match=r"'tags' is text: a tuple is required; write free_to_change=\('tags',\)"):
        load_config(Declaring, [], presets=presets)


class PlainGroup:
    width: int = 1


@dataclass(frozen=True)
class OfAnyObject:
    fn: object = None


@dataclass(frozen=True)
class WithPlainGroup:
    model: PlainGroup = field(default_factory=PlainGroup)


class Undecorated(Declaring):
    width: int = 1


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (OfAnyObject, r"the option fn has the type object: int, float, str, bool"),
        (
            WithPlainGroup,
            r"the option model has the type PlainGroup: .* write @dataclass\(frozen=True\) above the class",
        ),
        (Undecorated, r"Undecorated: width would be no options: a dataclass is required"),
    ],
)
def test_fields_that_are_no_options_are_refused(presets: Path, cls: type, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        load_config(cls, [], presets=presets)


@pytest.mark.parametrize("value", ["16", "0.9"])
def test_a_number_in_place_of_a_list_is_told_how_to_write_one(value: str, presets: Path) -> None:
    (presets / "demo.yaml").write_text(f"optimizer: {{betas: {value}}}\n")
    with pytest.raises(UsageError, match=rf"betas: {value} is refused: a list is required, as in \[{value}\]; change"):
        load(presets)


def test_a_recipe_without_another_preset_offers_none(presets: Path) -> None:
    """Its only one has an unknown option, and the message ended with an empty list."""
    (presets / "large.yaml").unlink()
    (presets / "demo.yaml").write_text("modes: 1\n")
    with pytest.raises(UsageError, match=r"demo\.yaml:1:1: unknown option 'modes': 1") as refused:
        load(presets)
    assert "Presets of this recipe" not in str(refused.value)
    (presets / "demo.yaml").unlink()
    with pytest.raises(UsageError, match=r"preset 'mine' does not exist; presets are none in .*/presets\. A file is"):
        load(presets, "mine")


def test_a_default_preset_that_is_not_there_is_named(presets: Path) -> None:
    """Not as the preset of a bundled recipe that has the same name."""
    (presets / "demo.yaml").unlink()
    said = r"/presets/demo\.yaml: no such file, .*; write it, {}, or name .* load_config\(default_preset=\.\.\.\)"
    with pytest.raises(UsageError, match=said.format("start with one of large")):
        load(presets, "--max_steps", "1")
    (presets / "large.yaml").unlink()
    with pytest.raises(UsageError, match=said.format("start with a YAML file of the options")):
        load(presets)
    with pytest.raises(UsageError, match="demo is a preset of"):
        load(presets, "demo")


def test_empty_text_is_refused_where_it_has_no_meaning(presets: Path) -> None:
    """A shell variable that is not set gives it, and as a path it is the working directory."""
    (presets / "empty.yaml").write_text("name: ''\n")
    for words in (["demo", "--name", ""], ["demo", "--name="], ["empty"]):
        with pytest.raises(UsageError, match=r"name: '' is refused: a value is required"):
            load(presets, *words)

    with pytest.raises(UsageError, match=r"steps: '' is refused: .*(whole number|integer|number).* is required"):
        load(presets, "demo", "--steps", "")

    @dataclass(frozen=True)
    class WithSuffix(Config):
        suffix: str = ""

    found = load_config(WithSuffix, ["demo", "--suffix", ""], presets=presets)
    assert found.config.suffix == ""


def test_later_sources_win_and_each_value_knows_its_origin(presets: Path) -> None:
    loaded = load(presets, "demo", "--steps", "20", "--optimizer.betas", "0.1", "0.2")
    assert loaded.config == Config(steps=20, optimizer=Group(lr=1e-4, betas=(0.1, 0.2), inner=Inner(1.0)))
    assert loaded.origins == {
        "seed": "default",
        "steps": "command line",
        "every": "default",
        "name": "default",
        "verbose": "default",
        "tags": "default",
        "resume": "default",
        "optimizer.lr": "demo",
        "optimizer.betas": "command line",
        "optimizer.fused": "default",
        "optimizer.biased": "default",
        "optimizer.inner.rate": "demo",
    }


@dataclass(frozen=True)
class OfOneLength(Config):
    """Steps or epochs."""

    epochs: PositiveInt | None = None
    """How often through the data."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(f"steps: {self.steps}, epochs: {self.epochs}: exactly one of the two is required")


def test_a_flag_gives_what_a_file_lacks(presets: Path) -> None:
    file = presets / "no_length.yaml"
    file.write_text("optimizer: {lr: 1e-4}\n")
    loaded = load_config(OfOneLength, ["no_length", "--epochs", "3", "--optimizer.inner.rate", "0.1"], presets=presets)
    assert loaded.config == OfOneLength(epochs=3, optimizer=Group(lr=1e-4, inner=Inner(0.1)))
    origins = {option: origin for option, origin in loaded.origins.items() if origin != "default"}
    assert origins == {"epochs": "command line", "optimizer.inner.rate": "command line", "optimizer.lr": "no_length"}
    with pytest.raises(UsageError, match=r"no_length\.yaml: steps: None, epochs: None: exactly one"):
        load_config(OfOneLength, ["no_length", "--optimizer.inner.rate", "0.1"], presets=presets)


def test_a_flag_replaces_what_is_wrong_in_a_file_as_its_error_says(presets: Path) -> None:
    file = presets / "wrong.yaml"
    file.write_text("steps: -1\n")
    with pytest.raises(UsageError, match=r"wrong\.yaml:1:1: steps: -1 is refused: .*in the file or with --steps"):
        load(presets, "wrong", "--every", "1")
    assert load(presets, "wrong", "--steps", "5").config == Config(steps=5)
    file.write_text("optimizer: 3\n")
    with pytest.raises(UsageError, match=r"wrong\.yaml:1:\d+: optimizer"):
        load(presets, "wrong", "--optimizer.lr", "1")


def test_a_preset_called_default_is_no_default(presets: Path) -> None:
    (presets / "default.yaml").write_text("steps: 10\n")
    loaded = load(presets, "default")
    assert (loaded.origins["steps"], loaded.origins["seed"]) == ("default.yaml", "default")


def test_a_flag_is_the_origin_even_where_it_repeats_the_value(presets: Path) -> None:
    loaded = load(presets, "demo", "--steps=10", "--no-verbose", "--optimizer.no_biased")
    assert {k for k, v in loaded.origins.items() if v == "command line"} == {"steps", "verbose", "optimizer.biased"}
    assert (loaded.config.steps, loaded.config.optimizer.biased) == (10, False)


def test_the_first_argument_names_the_source(presets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(presets).config.steps == 10
    assert load(presets, "large").config.tags == ("a", "b")
    own = tmp_path / "my run.yaml"
    own.write_text("steps: 7\n")
    assert load(presets, str(own)).origins["steps"] == str(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    assert load(presets, "my run.yaml").config.steps == 7
    assert load(presets, "$HERE/my run.yaml").config.steps == 7


def test_a_file_in_the_directory_does_not_hide_a_preset(
    presets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load(presets, "demo").config.steps == 10


def test_print_config_shows_everything_and_ends(presets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load(presets, "--print_config", "--seed", "3")
    assert left.value.code == 0
    lines = [line.split("  # ") for line in capsys.readouterr().out.splitlines()]
    shown = {setting.strip(): origin for setting, origin in lines}
    assert len(lines) == len(option_names(Config))
    assert shown["seed: 3"] == "command line"
    assert shown["optimizer.lr: 0.0001"] == "demo"
    assert shown["every: 0"] == "default"


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ("--verbose", "verbose", True),
        ("--verbose true", "verbose", True),
        ("--verbose True", "verbose", True),
        ("--verbose=false", "verbose", False),
        ("--no_verbose", "verbose", False),
        ("--no-verbose", "verbose", False),
        ("--optimizer.biased false", "optimizer.biased", False),
        ("--optimizer.biased FALSE", "optimizer.biased", False),
        ("--optimizer.no_biased", "optimizer.biased", False),
        ("--optimizer.fused false", "optimizer.fused", False),
        ("--optimizer.fused=true", "optimizer.fused", True),
        ("--optimizer.fused False", "optimizer.fused", False),
        ("--optimizer.fused auto", "optimizer.fused", "auto"),
        ("--steps null", "steps", None),
        ("--steps None", "steps", None),
        ("--steps=none", "steps", None),
        ("--name null", "name", None),
        ("--name true", "name", "true"),
        ("--tags true null false", "tags", ["true", "null", "false"]),
        ("--tags", "tags", []),
        ("--tags=x", "tags", ["x"]),
        ("--optimizer.lr 1e-5", "optimizer.lr", 1e-5),
        ("--optimizer.inner.rate 0", "optimizer.inner.rate", 0.0),
        ("--seed 4294967295", "seed", 2**32 - 1),
        ("--seed 0x10", "seed", 16),
        ("--every 1 --every 2", "every", 2),
        ("--optimizer.betas 0.1 0.2 --optimizer.betas 0.3 0.4", "optimizer.betas", [0.3, 0.4]),
        ("--name 1e3", "name", "1e3"),
        ("--name ~", "name", "~"),
        ("--name=a=true", "name", "a=true"),
        ("--tags 1 --name x", "tags", ["1"]),
        ("--tags -1 -x", "tags", ["-1", "-x"]),
    ],
)
def test_flags(flags: str, name: str, expected: object, presets: Path) -> None:
    value = flatten(to_tree(load(presets, *flags.split()).config))[name]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: {lr: 1e-4}", Config(optimizer=Group(lr=1e-4))),
        ("optimizer: {lr: 1}", Config(optimizer=Group(lr=1.0))),
        ("optimizer: {betas: [0.1, 0.2]}", Config(optimizer=Group(betas=(0.1, 0.2)))),
        ("optimizer: {fused: false}", Config(optimizer=Group(fused=False))),
        ("steps: null", Config()),
        ("name: no", Config(name="no")),
        ("tags: [on, 1x]", Config(tags=("on", "1x"))),
        ("optimizer: {}", Config()),
    ],
)
def test_yaml_values(text: str, expected: Config, presets: Path) -> None:
    (presets / "own.yaml").write_text(text)
    assert load(presets, "own").config == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1", r"own\.yaml:1:1: unknown option 'sed': 1; .*did you mean 'seed'\?"),
        ("steps: 3\noptimiser:\n  lr: 1", r"own\.yaml:3:3: unknown option 'optimiser\.lr': 1.*'optimizer\.lr'"),
        (
            "optimizer.lr: 1",
            r"unknown option 'optimizer\.lr': 1; in a file groups are mappings: optimizer: {lr: ",
        ),
        ("ever_steps: 1", r"unknown option 'ever_steps': 1; remove it or correct it \(did you mean 'steps'\?\)"),
        ("lr: 1", r"unknown option 'lr': 1.*'optimizer\.lr'"),
        ("optimizer: {lr: {a: 1}}", r"unknown option 'optimizer\.lr\.a'"),
        ("optimizer: [1]", r"optimizer: \[1\] must be a mapping"),
        ("optimizer: null", r"optimizer: None must be a mapping"),
        (
            "zzz: 1",
            r"unknown option 'zzz': 1; this recipe has no such option: remove it, or find its present name with --help "
            r"all\. Presets of this recipe",
        ),
        ("optimizer: {wd: 1}", r"unknown option 'optimizer\.wd': 1; this recipe has no such option"),
        ("sampler: {name: ddim}", r"unknown option 'sampler\.name': 'ddim'; .* \(did you mean 'name'\?"),
        ("optimizer: {verbose: true}", r"unknown option 'optimizer\.verbose': True; this recipe has no such option"),
        ("batch_size: 3\nlearning_rate: 1", r"unknown option 'batch_size'"),
        ("learning_rate: 1", r"use --optimizer\.lr\."),
        (
            "optimizer: {lr: fast}",
            r"own\.yaml:1:13: optimizer\.lr: 'fast' is refused: a number is required; .*--optimizer",
        ),
        ("optimizer: {lr: true}", r"optimizer\.lr: true is refused"),
        ("steps: 1.5", r"steps: 1\.5 is refused: .*integer"),
        ("steps: true", r"steps: true is refused"),
        ("steps: [1]", r"steps: \[1\] is refused"),
        ("resume: [never]", r"resume: \['never'\] is refused: a value 'auto' or 'never' is required; change it"),
        ("optimizer: {fused: [auto]}", r"fused: \['auto'\] is refused: a value 'auto', True or False is required"),
        ("steps: 1e1", r"steps: 10\.0 is refused: an integer or null is required \(write 10\)"),
        ('steps: "8"', r"steps: '8' is refused: an integer or null is required \(leave the quotes out\)"),
        ('optimizer: {lr: "1"}', r"optimizer\.lr: '1' is refused: a number is required \(leave the quotes out\)"),
        ("verbose: yes", r"verbose: 'yes' is refused: true or false is required \(write true or false"),
        ('verbose: "on"', r"verbose: 'on' is refused: true or false"),
        ('verbose: "1"', r"verbose: '1' is refused: true or false"),
        ("verbose: 1", r"verbose: 1 is refused: true or false"),
        ("optimizer: {fused: atuo}", r"fused: 'atuo' is refused: 'auto' or true or false .*did you mean 'auto'\?"),
        ('optimizer: {betas: [0.1, "0.2"]}', r"betas: '0\.2' is refused: a list with a number for each element"),
        ("name: 3", r"name: 3 is refused: text or null is required"),
        ("name: true", r"name: true is refused"),
        ("tags: a", r"tags: 'a' is refused"),
        ("optimizer: {betas: [0.1]}", r"optimizer\.betas.* is refused"),
        (
            "optimizer: {betas: [0.1, 1.0]}",
            r"optimizer\.betas\.1: 1\.0 is refused: .*less than 1 is required; .*--optimizer\.betas$",
        ),
        ("optimizer: {betas: [0.9, 0.1]}", r"own\.yaml:1:1: optimizer: betas \(0\.9, 0\.1\): .*; swap them$"),
        ("optimizer: {inner: {rate: 1.1}}", r"optimizer\.inner\.rate: 1\.1 is refused: .*less than or equal to 1"),
        ("optimizer: {lr: .inf}", r"optimizer\.lr: inf is refused: .*finite"),
        ("seed: -1", r"seed: -1 is refused"),
        ("seed: 4294967296", r"seed: 4294967296 is refused"),
        ("seed: 1\nseed: 2", r"own\.yaml:2:1: key `seed` is given twice"),
        ("", r"the file is empty"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_remedy(text: str, message: str, presets: Path) -> None:
    (presets / "own.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load(presets, "own")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("dmo", r"preset 'dmo' does not exist \(did you mean 'demo'\?\); presets are demo, large"),
        ("none.yaml", r"there is no such file"),
        ("some/where", r"there is no such file"),
        ("demo --learning_rate 1", r"--learning_rate is a name from other scripts; here use --optimizer\.lr"),
        ("demo --network_dim 4", r"here no option corresponds to it \(other recipes have --lora\.rank\)"),
        ("demo --enable_bucket", r"here no option corresponds to it \(other recipes have --data\.resolutions"),
        ("demo --cache_latents", r"here there is none: what encoders compute is always cached"),
        ("demo --gradient-accumulation-steps=4", r"--global_batch_size and --micro_batch_size"),
        (
            "demo --optimizer.learning_rate 1",
            r"--optimizer\.learning_rate is a name from other.*--optimizer\.lr",
        ),
        ("demo --steps 0", r"steps: 0 is refused: .*greater than 0"),
        (
            "demo --steps 100000000000000000000",
            r"steps: 1\d+ is refused: .*less than or equal to 9007199254740992",
        ),
        ("demo --seed=-1", r"command line: seed: -1 is refused"),
        ("demo --seed -1", r"command line: seed: -1 is refused"),
        ("demo --optimizer.lr .inf", r"optimizer\.lr: inf is refused: .*finite"),
        ("demo --optimizer.lr inf", r"optimizer\.lr: 'inf' is refused: a number is required \(a finite one\)"),
        ("demo --optimzer.lr 1", r"--optimzer\.lr: unknown option \(did you mean '--optimizer\.lr'\?"),
        ("demo --zzz 1", r"--zzz: unknown option; --help all lists all"),
        ("demo --ever_steps 1", r"--ever_steps: unknown option \(did you mean '--steps'\?\)"),
        ("demo --inner_stepsize 1", r"--inner_stepsize: unknown option; --help all lists all"),
        ("demo --optimizer.inner.raet 1", r"--optimizer\.inner\.raet: .*did you mean '--optimizer\.inner\.rate'\?"),
        ("demo --optimizer 1", r"--optimizer is a group of options, not an option; write --optimizer\.lr VALUE"),
        ("demo --seed fast", r"seed: 'fast' is refused: an integer is required; correct --seed$"),
        ("demo --seed", r"--seed has no value; write --seed VALUE"),
        (
            "demo --tags a --seed 1 --tags=b",
            r"--tags is given twice; write all its values after one --tags$",
        ),
        ("demo --seed 007", r"seed: '007' is refused: an integer"),
        ("demo --seed 1_000", r"seed: '1_000' is refused: an integer"),
        ("demo --seed 1e3", r"seed: 1000\.0 is refused: an integer is required \(write 1000\)"),
        ("demo --verbose yes", r"verbose: 'yes' is refused: true or false is required \(write true or false"),
        ("demo --optimizer.betas 0.9 0.1", r"command line: optimizer: betas \(0\.9, 0\.1\): .*; swap them$"),
        ("demo --steps 1.5", r"steps: 1\.5 is refused: an integer or null is required"),
        ("demo large", r"'large': the preset or file comes first, before every flag; write large --flag value"),
        ("--seed 3 large", r"'large': the preset or file comes first"),
        ("--verbose my.yaml", r"'my\.yaml': the preset or file comes first"),
        ("steps=10", r"'steps=10': an option begins with two dashes; write --steps 10$"),
        ("steps 10", r"'steps': an option begins with two dashes; write --steps 10$"),
        ("demo optimizer.lr=1", r"'optimizer\.lr=1': .*write --optimizer\.lr 1$"),
        ("demo -steps 10", r"'-steps': .*write --steps 10$"),
        ("demo --seed 1 2", r"'2' belongs to no option.* text with spaces$"),
        ("demo --verbose 3", r"'3' belongs to no option.*; --verbose before it takes true, false or no value$"),
        ("other", r"other\.yaml:1:1: unknown option 'modes': 1; .*\. Presets of this recipe are demo, large$"),
        ("'{presets}/a machine.yaml'", r"a launch file .*: accelerate launch --config_file '/.*/a machine\.yaml' "),
        ("--seed 3 'my own.yaml'", r"comes first, before every flag; write 'my own\.yaml' --flag value"),
    ],
)
def test_a_wrong_command_line_is_refused(argv: str, message: str, presets: Path) -> None:
    (presets / "other.yaml").write_text("modes: 1\n")  # of another recipe: never offered
    (presets / "a machine.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(UsageError, match=message):
        load(presets, *shlex.split(argv.replace("{presets}", str(presets))))


WORDS = "8 -8 +8 8.0 1e0 1e3 .5 5. 0x10 0o10 010 1_0 10_ .inf .nan inf true False null None yes on auto"


@pytest.mark.parametrize("name", ["seed", "steps", "verbose", "optimizer.lr", "optimizer.fused"])
def test_a_word_means_the_same_in_a_file_and_after_a_flag(name: str, presets: Path) -> None:
    """Accepted with the same value or refused, whatever the word and the type of the option."""
    (presets / "empty.yaml").write_text("every: 0\n")

    def outcome(*argv: str) -> object:
        try:
            return load(presets, *argv).config
        except UsageError:
            return "refused"

    for word in WORDS.split():
        group, _, leaf = name.rpartition(".")
        (presets / "own.yaml").write_text(f"{group}: {{{leaf}: {word}}}\n" if group else f"{leaf}: {word}\n")
        if (name, word) != ("steps", "None"):  # YAML's word for it is null
            assert outcome("own") == outcome("empty", f"--{name}={word}"), word


@pytest.mark.parametrize(
    "text", ["1e3", "0x10", "007", "08", "1_000", "~", "null", "no", " a", "a: b", "é", "-", "[a", "12:30"]
)
def test_text_is_saved_as_text(text: str, presets: Path) -> None:
    write_config(config_text(Config(name=text, tags=(text,))), presets / "saved.yaml")
    assert load(presets, "saved").config == Config(name=text, tags=(text,))


def test_saving_leaves_out_what_belongs_to_the_call(presets: Path) -> None:
    write_config(config_text(Config(resume="never", seed=5)), presets / "saved.yaml")
    assert load(presets, "saved").config == Config(seed=5)
    assert sorted(p.name for p in presets.iterdir()) == ["demo.yaml", "large.yaml", "saved.yaml"]


def test_paths_are_expanded_against_the_directory_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("PLACE", "x y")
    assert expand_path("runs/") == tmp_path / "runs"
    assert expand_path("~/a") == Path("/home/somebody/a")
    assert expand_path("$PLACE/../b") == tmp_path / "b"


@pytest.mark.parametrize(
    ("options", "flag", "message"),
    [
        (PictureOptions, "--text", "here use --prompt for a model of pictures"),
        (LanguageOptions, "--prompt", "here use --text for a language model"),
    ],
)
def test_the_flag_of_another_kind_of_model_is_refused_with_its_own(options: type, flag: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_options(options, [flag, "a red flag"], "accel-train sample runs/a")
