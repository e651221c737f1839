"""Recipes with one mistake each: the scaffold's text with a few lines replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCAFFOLD = Path(__file__).parents[2] / "recipes" / "scaffold" / "recipe.py"

WEIGHTS = 'weighted = [(batch, batch["weight"]) for batch in batches.micro_batches]'
LOSSES = 'metrics_of(prepared.model, batch)["loss"] * batch["weight"]'
LOSS = "    return {"
LOGITS = 'logits = model(batch["place"]).float()'
ENTROPY = 'loss = nn.functional.cross_entropy(logits, batch["ring"], reduction="none")'
MODEL = "return RingModel(nn.Linear(2, width), nn.GELU(),"
PREPARE = "    prepared = preparation.prepare(opened, preparation.build_model(opened, build_model, config.width))\n"
OPTIMIZER = "    optimizer = prepared.optimizer\n"
EVALUATE = "    evaluate = partial(loop.heldout_means, prepared, heldout, config.micro_batch_size, metrics_of)\n"
WINDOW = "            for batch in window:  # the window sums the losses and divides by the weights of all processes\n"
ZIPPED = "            for _, loss in zip(window, losses):\n"
CLIP = "window.finish(config.optimizer.max_grad_norm)"
CONDITIONED = """class Conditioned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.condition, self.input, self.output = nn.Linear(2, width), nn.Linear(2, width), nn.Linear(width, 5)

    def forward(self, place: Tensor) -> Tensor:
        return self.output(self.input(place) * self.condition(place).detach())


def build_model(width: int) -> nn.Module:
    return Conditioned(width)


def plain_model("""


@dataclass(frozen=True)
class Fault:
    """A mistake, and what is to be found."""

    named_by: str
    """The check that names it."""
    replaced: tuple[tuple[str, str], ...]
    """Text of the scaffold -> text with the mistake."""
    consequences: frozenset[str] = frozenset()
    """Other checks that fail because of it."""
    said: str = ""
    """Part of what the check says."""


def _fault(named_by: str, *replaced: tuple[str, str], also: str = "", said: str = "") -> Fault:
    return Fault(named_by, replaced, frozenset(also.split()), said)


NEGATIVES = "loss = nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction='none')"
DRAWN = LOGITS.replace('batch["place"]', 'batch["place"] + 0.3 * torch.rand(2)')
CUT = "accumulation ragged two_processes"
FAULTS = {
    "mean of means": _fault(
        "ragged",
        (WEIGHTS, "weighted = [(batch, torch.ones(())) for batch in batches.micro_batches]"),
        (LOSSES, f"({LOSSES}).mean()"),
        also="two_processes",
    ),
    "tail divided by the full window": _fault(
        "ragged",
        (WEIGHTS, WEIGHTS.replace('batch["weight"]', "torch.tensor(1.0 * config.micro_batch_size)")),
        also="two_processes",
    ),
    "negatives from the batch": _fault(
        "accumulation",
        (ENTROPY, NEGATIVES),
        also="ragged two_processes",
    ),
    "clip forgotten": _fault("clip", (CLIP, "window.finish(0.0)"), said="expected"),
    "clip divided by the processes": _fault(
        "clip",
        (CLIP, "window.finish(config.optimizer.max_grad_norm / accelerator.num_processes)"),
        also="two_processes",
        said="two_processes",
    ),
    "same noise on all ranks": _fault(
        "two_processes",
        (
            LOGITS,
            'keys = rng.sample_keys(0, "noise", 0, torch.arange(len(batch["place"])))\n'
            '    logits = model(batch["place"] + 0.3 * rng.normal(keys, (2,))).float()',
        ),
        also="accumulation ragged sample_order",
    ),
    "noise by the place in the micro-batch": _fault(
        "sample_order",
        (LOGITS, LOGITS.replace('batch["place"]', 'batch["place"] * torch.arange(len(batch["place"]))[:, None]')),
        also=CUT,
    ),
    "schedule counted by process": _fault(
        "learning_rate",
        ("learning_rate_factor(batches.step)", "learning_rate_factor(batches.step * accelerator.num_processes)"),
        also="two_processes",
        said="two_processes",
    ),
    "unkeyed dropout": _fault(
        "unkeyed_draws", (MODEL, MODEL + " nn.Dropout(0.3),"), also="two_processes sample_order"
    ),
    "torch.rand in the loss": _fault(
        "unkeyed_draws", (LOGITS, DRAWN), also=f"{CUT} evaluation"
    ),
    "a seed from the clock": _fault(
        "repeat",
        (LOGITS, f"torch.seed()\n    {DRAWN}"),
        also=f"{CUT} sample_order unkeyed_draws resume evaluation",
    ),
    "frozen conditioning layer": _fault(
        "gradient_paths",
        ("def build_model(", CONDITIONED),
        also="two_processes learning_rate clip reductions resume",
        said="condition.weight",
    ),
    "parameter missing from the optimizer": _fault(
        "optimizer_groups",
        (
            PREPARE,
            "    model: Any = preparation.build_model(opened, build_model, config.width)\n"
            "    model[0].requires_grad_(False)\n"
            "    prepared = preparation.prepare(opened, model)\n"
            "    model[0].requires_grad_(True)\n",
        ),
        ("from pathlib import Path\n", "from pathlib import Path\nfrom typing import Any\n"),
        # A gradient that is not reduced is clipped differently by each process, whose weights then differ.
        also="two_processes reductions resume learning_rate clip",
        said="0.weight in none",
    ),
    "weight of a repeated sample ignored": _fault(
        "two_processes",
        (WEIGHTS, 'weighted = [(batch, torch.ones_like(batch["weight"]).sum()) for batch in batches.micro_batches]'),
        (LOSSES, LOSSES.replace(' * batch["weight"]', "")),
        # The loop refuses it, so none of the checks on two processes can pass.
        also="clip learning_rate reductions",
        said="refused: window.backward: 1 sample(s) of this step have weight 0, but their loss is not 0",
    ),
    "evaluation that leaves the model in eval mode": _fault(
        "evaluation",
        (LOGITS, LOGITS.replace('batch["place"]', 'batch["place"] * (1.5 if model.training else 1.0)')),
        (
            EVALUATE,
            "    def evaluate() -> dict[str, float]:\n"
            "        metrics = loop.heldout_means(prepared, heldout, config.micro_batch_size, metrics_of)\n"
            "        prepared.model.eval()\n"
            "        return metrics\n\n",
        ),
    ),
    "evaluation that draws what training draws": _fault(
        "evaluation",
        (LOSSES, f"{LOSSES} * (1 + torch.rand(()))"),
        (
            EVALUATE,
            "    def evaluate() -> dict[str, float]:\n        return {\"drawn\": float(torch.rand(()))}\n\n",
        ),
        also=f"{CUT} unkeyed_draws",
    ),
    "optimizer state dropped on resume": _fault(
        "resume", (OPTIMIZER, OPTIMIZER + "    optimizer.optimizer.state.clear()\n")
    ),
    "state outside the checkpoint": _fault(
        "resume",
        (OPTIMIZER, OPTIMIZER + "    scale = 1.0\n"),
        (WINDOW, "            scale *= 0.8\n" + WINDOW),
        (LOSSES, f"scale * {LOSSES}"),
    ),
    "no_sync around the backward only": _fault(
        "two_processes",
        (WINDOW, f"            losses = [{LOSSES} for batch in batches.micro_batches]\n{ZIPPED}"),
        (f"window.backward({LOSSES})", "window.backward(loss)"),
        # The weights of the two differ then, which ends the run.
        also="learning_rate clip reductions",
    ),
    "a reduction for each micro-batch": _fault(
        "reductions",
        ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
        ("prepared.window(", 'replace(prepared, sync="every").window('),
        said="2 in a step, expected 1",
    ),
    "error of one layout": _fault(
        "two_processes",
        (WINDOW, f'            assert accelerator.num_processes == 1, "only one process is expected"\n{WINDOW}'),
        said="AssertionError: only one process is expected",
        also="learning_rate clip reductions",
    ),
    "gradients cleared before the step": _fault(
        "first_step",
        ("            optimizer.step()\n            optimizer.zero_grad()\n",
         "            optimizer.zero_grad()\n            optimizer.step()\n"),
        also="clip gradient_paths",
    ),
}  # fmt: skip


def write(folder: Path, *names: str) -> Path:
    """Write the recipe with one fault or several, with the scaffold's presets beside it."""
    text = SCAFFOLD.read_text()
    for name in names:
        for before, after in FAULTS[name].replaced:
            assert text.count(before) == 1, (name, before, text.count(before))
            text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.py"
    recipe.write_text(text)
    (folder / "presets").symlink_to(SCAFFOLD.parent / "presets")
    return recipe
