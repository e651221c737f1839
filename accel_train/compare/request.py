"""Request for a comparison, as given on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from accel_train.config import UsageError


@dataclass(frozen=True)
class Request:
    """Options of ``accel-train compare``. Raises ``UsageError`` for values that contradict each other."""

    recipe: str
    sources: tuple[str, ...]
    """Two presets or YAML files, or a single one with ``vary``."""
    config_file: str | None = None
    """Launch file for ``accel-train launch``. None runs the recipe as one plain process."""
    num_processes: int | None = None
    """Overrides the number of processes in the launch file."""
    common: tuple[str, ...] = ()
    """Options for every run, each as ``key=value``."""
    vary: str | None = None
    """The option to vary, as ``key=v1,v2``."""
    ablate: bool = False
    """Also run A with each differing option of B by itself."""
    max_steps: int | None = None
    max_epochs: float | None = None
    seed: int | None = None
    seeds: tuple[int, ...] = ()
    """A round for each seed, which all runs of the round have. Intervals of losses are then over seeds."""
    rounds: int = 5
    gates: tuple[str, ...] = ()
    output: str | None = None
    """None creates a new directory under runs/."""
    tolerance: float = 1e-5
    """Smaller differences of losses and evaluation metrics, relative to A, count as equal."""
    keep_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.seeds:
            self._refuse_other_seeds()
        if self.rounds < 1:
            raise UsageError(f"--rounds {self.rounds}: at least 1 is required; 5 give a reliable interval")
        if not 0 <= self.tolerance < float("inf"):
            raise UsageError(f"--tolerance {self.tolerance}: a number from 0 up is required, such as 1e-5")
        if self.max_steps is not None and self.max_epochs is not None:
            raise UsageError(
                f"--max_steps {self.max_steps} and --max_epochs {self.max_epochs}: a run ends once; give one of the two"
            )
        if self.ablate and self.vary is not None:
            raise UsageError(
                f"--ablate and --vary {self.vary}: the first takes two configs, the second one; leave one of them out"
            )
        sources = f"{len(self.sources)} preset(s) or file(s) given ({', '.join(self.sources)})"
        if self.vary is not None and len(self.sources) != 1:
            raise UsageError(f"{sources}; --vary takes one")
        if self.vary is None and len(self.sources) != 2:
            raise UsageError(f"{sources}; two are required, A and B, or one with --vary key=v1,v2")
        if self.num_processes is not None and self.config_file is None:
            raise UsageError(
                f"--num_processes {self.num_processes} without --config_file: without a launch file every run is one "
                "process; give one, such as accelerate_configs/ddp.yaml"
            )

    def _refuse_other_seeds(self) -> None:
        given = f"--seeds {' '.join(map(str, self.seeds))}"
        if len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"{given}: names a seed twice, and a run with it would be the same; give each once")
        if self.seed is not None:
            raise UsageError(f"--seed {self.seed} and {given}: both set the seed; leave one of them out")
        if self.vary is not None and self.vary.removeprefix("--").startswith("seed="):
            raise UsageError(f"--vary {self.vary} and {given}: both set the seed; leave one of them out")
        if self.rounds != len(self.seeds):
            raise UsageError(
                f"--rounds {self.rounds} and {given}: there is one round for each seed; leave --rounds out"
            )

    def settings(self) -> dict[str, str]:
        """Return the options of ``common`` by name. Raises ``UsageError`` for one without a value or given twice."""
        found: dict[str, str] = {}
        for text in self.common:
            name, equals, value = text.removeprefix("--").partition("=")
            if not equals or not name or not value:
                raise UsageError(f"--set {text}: KEY=VALUE is required, such as --set data.path=my.jsonl")
            if name in found:
                raise UsageError(f"--set {name}: given twice, {found[name]} and {value}; give one")
            found[name] = value
        return found

    def processes(self) -> list[str]:
        """Return ``--num_processes`` and its value for ``accel-train launch``, or an empty list if it is not set."""
        return [] if self.num_processes is None else ["--num_processes", str(self.num_processes)]
