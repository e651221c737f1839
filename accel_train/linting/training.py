"""Rules about length, schedule, optimizer, evaluation and compilation."""

from __future__ import annotations

import math

from accel_train.linting.facts import Facts
from accel_train.linting.findings import Finding, Rule

LARGE_LR = 1e-2
LARGE_LR_OF_TUNING = 5e-4
SMALL_LR_OF_ADAPTERS = 3e-5
LARGE_EPS = 1e-4
MANY_PASSES = 100
LANGUAGE = "data.packing"
"""An option that only language models have."""
MANY_SHAPES = 8
ADAM = ("adamw", "adamw8bit", "adamw_offload")
DECAYED_SHARE = 0.1


def warmup_beyond_the_run(facts: Facts) -> Finding | None:
    """A warm-up longer than the run never reaches the peak. A start refuses it. It shortens a warm-up from a preset or
    file instead if the command line has shortened the run, or if `max_epochs` over few samples sets its length.
    """
    warmup = int(facts.number("schedule.warmup_steps"))
    if facts.steps is None or facts.option("schedule.decay_steps") is not None or warmup <= facts.steps:
        return None
    # Then a start shortens the warm-up of a preset by itself.
    shortened = facts.option("max_epochs") is not None or facts.origins.get("max_steps") == "command line"
    if shortened and facts.origins.get("schedule.warmup_steps") != "command line":
        return None
    better = max(1, facts.steps // 10)
    return Finding(
        option="schedule.warmup_steps",
        value=warmup,
        reason=f"the run has {facts.steps} steps, so the learning rate never reaches its peak",
        remedy=f"give {better}, a tenth of the run",
    )


def long_warmup(facts: Facts) -> Finding | None:
    """A warm-up of more than half of the run leaves no time to train at the peak. Usual is 1 to 10 %. It counts
    optimizer steps, not micro-batches, and is not multiplied by the processes.
    """
    warmup = int(facts.number("schedule.warmup_steps"))
    if facts.steps is None or facts.is_trial or not facts.steps / 2 < warmup <= facts.steps:
        return None
    better = facts.steps // 20
    return Finding(
        option="schedule.warmup_steps",
        value=warmup,
        reason=f"{warmup / facts.steps:.0%} of {facts.steps} steps are below the peak learning rate",
        remedy=f"give about {better}",
    )


def steps_without_learning_rate(facts: Facts) -> Finding | None:
    """After `decay_steps` the learning rate stays at the floor. With a floor of 0, further steps change nothing."""
    end = facts.option("schedule.decay_steps")
    if end is None or facts.steps is None or facts.number("schedule.floor") > 0 or end >= facts.steps:
        return None
    return Finding(
        option="schedule.decay_steps",
        value=end,
        reason=f"the last {facts.steps - end} of {facts.steps} steps have learning rate 0 and train nothing",
        remedy="leave it out, or give a schedule.floor above 0",
    )


def ema_never_reached(facts: Facts) -> Finding | None:
    """The EMA's decay rises as (1 + step) / (10 + step). A decay whose half-life is longer than the run is never
    reached: it has no effect, and the EMA averages over about a ninth of the run.
    """
    decay = facts.number("ema.decay")
    steps = facts.steps
    if decay == 0 or steps is None or facts.is_trial:
        return None
    half_life = math.log(2) / (1 - decay)
    if half_life <= steps:
        return None
    reached = (1 + steps) / (10 + steps)
    # A decay for which the mean age of the weights is a hundredth of the run.
    # Rounded to one digit more than it needs to differ from 1.
    better = round(1 - 100 / steps, max(2, len(str(steps)) - 2))
    return Finding(
        option="ema.decay",
        value=decay,
        reason=f"its half-life is {half_life:.0f} steps, and {steps} steps reach a decay of only {reached:.4f}",
        remedy=f"give {better:g}, or keep it if the rising decay is enough",
    )


def evaluation_outweighs_training(facts: Facts) -> Finding | None:
    """An evaluated sample costs at least one forward, a trained one about three. If an evaluation has more samples than
    are trained on between two evaluations, it takes a quarter of the time or more.
    """
    every = facts.number("evaluation.every")
    samples = facts.number("evaluation.samples")
    trained = every * facts.samples_per_step
    if not every or facts.is_trial or samples <= trained:
        return None
    # Ten samples trained on for each evaluated one: about 3 % of the time, at a third of the cost each.
    better = math.ceil(10 * samples / facts.samples_per_step)
    return Finding(
        option="evaluation.every",
        value=int(every),
        reason=f"{samples:.0f} samples are evaluated after every {trained:.0f} trained on",
        remedy=f"give {better} or more, or fewer evaluation.samples",
        change=("evaluation.every", better),
    )


def log_every_step(facts: Facts) -> Finding | None:
    """At a log point the host waits for the device, which then waits for the host to launch the next step."""
    if not facts.on_gpu or facts.option("log.log_every") != 1 or facts.is_trial:
        return None
    return Finding(
        option="log.log_every",
        value=1,
        reason="the host waits for the device in every step, so launches no longer run ahead",
        remedy="give 10 or more",
        change=("log.log_every", 10),
    )


def nothing_logged(facts: Facts) -> Finding | None:
    """Training lines are written at multiples of `log_every`, and for the first and the last step."""
    every = int(facts.number("log.log_every"))
    if facts.steps is None or facts.is_trial or every < facts.steps:
        return None
    # About a hundred points of a curve.
    better = max(1, facts.steps // 100)
    return Finding(
        option="log.log_every",
        value=every,
        reason=f"the run has {facts.steps} steps: its curve has two points",
        remedy=f"give {better}",
        change=("log.log_every", better),
    )


def large_lr(facts: Facts) -> Finding | None:
    """Adam moves every weight by about the learning rate in each step, whatever the gradient. A rate above 0.01 is
    usually meant for SGD.
    """
    lr = facts.number("optimizer.lr")
    if facts.option("optimizer.name") not in ADAM or lr <= LARGE_LR:
        return None
    return Finding(
        option="optimizer.lr",
        value=lr,
        reason=f"{facts.option('optimizer.name')} moves each weight by about {lr:g} per step; weights of a layer of "
        "width 1024 have a size of about 0.03",
        remedy="give 1e-4 to 3e-3 from scratch, less for pretrained weights",
    )


def large_lr_of_tuning(facts: Facts) -> Finding | None:
    """A full fine-tune moves all pretrained weights. At a learning rate for training from scratch the model forgets
    what it has learned.
    """
    lr = facts.number("optimizer.lr")
    pretrained = facts.option("model.source")
    if pretrained is None or facts.number("lora.rank") > 0 or not LARGE_LR_OF_TUNING < lr <= LARGE_LR:
        return None
    return Finding(
        option="optimizer.lr",
        value=lr,
        reason=f"all weights of {pretrained} are trained at a learning rate for training from scratch",
        remedy="give 1e-6 to 1e-4, or train adapters (lora.rank)",
    )


def small_lr_of_adapters(facts: Facts) -> Finding | None:
    """Adapters begin at zero and are moved by the learning rate alone. At the rate of a full fine-tune they learn next
    to nothing in the same number of steps.
    """
    lr = facts.number("optimizer.lr")
    if facts.number("lora.rank") == 0 or facts.option("optimizer.name") not in ADAM or lr >= SMALL_LR_OF_ADAPTERS:
        return None
    return Finding(
        option="optimizer.lr",
        value=lr,
        reason="that is a rate for all weights of a model, about a tenth of what adapters (lora.rank) need",
        remedy="give 1e-4 to 3e-4",
    )


def swapped_betas(facts: Facts) -> Finding | None:
    """The first beta averages the gradient, the second its square. Adam's bound needs the first below the root of the
    second. The reverse order is a mistake.
    """
    betas = list(facts.option("optimizer.betas") or ())
    # Equal ones are unusual, but not swapped.
    if len(betas) != 2 or betas[0] <= betas[1]:
        return None
    return Finding(
        option="optimizer.betas",
        value=betas,
        reason=f"the squares are forgotten in {1 / (1 - betas[1]):.0f} steps, the mean in {1 / (1 - betas[0]):.0f}: "
        "the order is mean, then squares",
        remedy=f"give {betas[1]:g} {betas[0]:g}",
    )


def large_eps(facts: Facts) -> Finding | None:
    """eps is added to the root of the running square. If it is larger than the gradients, it turns Adam into SGD with a
    small learning rate.
    """
    eps = facts.number("optimizer.eps")
    if facts.option("optimizer.name") not in ADAM or eps <= LARGE_EPS:
        return None
    return Finding(
        option="optimizer.eps",
        value=eps,
        reason="a gradient of norm 1 over 100 million weights is about 1e-4 for each: their steps shrink to "
        f"{1e-4 / (1e-4 + eps):.0%}",
        remedy="give 1e-8, or up to 1e-6",
    )


def decayed_adapters(facts: Facts) -> Finding | None:
    """Weight decay of an adapter pulls the model back to its base, by the product of decay, learning rate and steps."""
    decay = facts.number("optimizer.weight_decay")
    if facts.number("lora.rank") == 0 or facts.steps is None:
        return None
    # At the peak rate throughout, so the share is an upper bound.
    exponent = facts.number("optimizer.lr") * decay * facts.steps
    if exponent <= DECAYED_SHARE:
        return None
    return Finding(
        option="optimizer.weight_decay",
        value=decay,
        reason=f"over {facts.steps} steps it removes up to {1 - math.exp(-exponent):.0%} of the adapter",
        remedy="give 0 or 0.01",
    )


def scale_of_adapters(facts: Facts) -> Finding | None:
    """The output of an adapter is multiplied by alpha / rank, or with rslora by alpha / sqrt(rank). If that is far from
    1, commonly recommended learning rates do not apply.
    """
    rank = facts.number("lora.rank")
    alpha = facts.option("lora.alpha")
    if rank == 0 or alpha is None:
        return None
    divisor = math.sqrt(rank) if facts.option("lora.variant") == "rslora" else rank
    scale = alpha / divisor
    # Scales that guides recommend, such as alpha = 2 * rank, are well inside.
    if 1 / 16 <= scale <= 16:
        return None
    return Finding(
        option="lora.alpha",
        value=alpha,
        reason=f"the adapters of rank {rank:g} are scaled by {scale:.3g}",
        remedy="leave it out for a scale of 1, or change the learning rate with it",
    )


def many_passes(facts: Facts) -> Finding | None:
    """From up to four passes over its texts, a language model learns as much as from new texts. After some tens of
    passes, further ones teach it next to nothing.
    """
    # Pictures and fields are trained on for hundreds of passes, augmented and with new noise in each.
    if LANGUAGE not in facts.options:
        return None
    passes = facts.number("max_epochs")
    if facts.dataset_size is not None and facts.steps is not None:
        passes = facts.steps * facts.samples_per_step / facts.dataset_size
    # Adapters are often trained on a few texts in one style, with many passes on purpose.
    if passes <= MANY_PASSES or facts.number("lora.rank") > 0:
        return None
    option = "max_steps" if facts.option("max_epochs") is None else "max_epochs"
    size = "the data" if facts.dataset_size is None else f"{facts.dataset_size:,} samples"
    return Finding(
        option=option,
        value=facts.option(option),
        reason=f"the run passes over {size} {passes:,.0f} times, and the later passes teach it next to nothing",
        remedy="train for fewer steps, on more data, or evaluate often and keep the best (checkpoints.keep_best)",
    )


def uncompiled_float8(facts: Facts) -> Finding | None:
    """float8 scales and casts every input of a matrix product. Uncompiled, these passes over memory cost more than the
    faster product saves.
    """
    if facts.option("float8", "none") == "none" or facts.compiles:
        return None
    return Finding(
        option="float8",
        value=facts.option("float8"),
        reason="without compile.mode on, scaling and casting are separate kernels, and slower than bf16 overall",
        remedy="compile the blocks",
        change=("compile.mode", "on"),
    )


def cuda_graphs_with_accumulation(facts: Facts) -> Finding | None:
    """`reduce-overhead` replays CUDA graphs, whose outputs the next micro-batch overwrites. A start refuses it."""
    if facts.option("compile.optimize") != "reduce-overhead" or not facts.compiles or facts.accumulation == 1:
        return None
    return Finding(
        option="compile.optimize",
        value="reduce-overhead",
        reason=f"each step has {facts.accumulation} micro-batches, and a graph overwrites what the previous one keeps",
        remedy="give max-autotune-no-cudagraphs or default",
        change=("compile.optimize", "default"),
    )


def many_compiled_shapes(facts: Facts) -> Finding | None:
    """With `compile.dynamic: false` every padded length is compiled separately, which takes seconds to minutes each."""
    shapes = facts.option("loader.bucket_shapes") or 0
    if not facts.compiles or facts.option("compile.dynamic") or shapes <= MANY_SHAPES:
        return None
    return Finding(
        option="compile.dynamic",
        value=False,
        reason=f"loader.bucket_shapes: {shapes} lengths mean {shapes} compilations of every block",
        remedy="compile once for all lengths, or use 4 lengths",
        change=("compile.dynamic", True),
    )


CONFIG = "docs/config.md"
ADAM_PAPER = "Kingma and Ba, arXiv:1412.6980"
TRAINING_RULES = (
    Rule("warmup-beyond-the-run", "error", CONFIG, warmup_beyond_the_run, "data"),
    Rule("long-warmup", "warning", "accelerate#662", long_warmup),
    Rule("steps-without-learning-rate", "warning", CONFIG, steps_without_learning_rate),
    Rule("ema-never-reached", "warning", "diffusers: EMAModel", ema_never_reached),
    Rule("evaluation-outweighs-training", "warning", CONFIG, evaluation_outweighs_training),
    Rule("log-every-step", "warning", "docs/metrics.md", log_every_step),
    Rule("nothing-logged", "warning", "docs/metrics.md", nothing_logged),
    Rule("large-learning-rate", "warning", ADAM_PAPER, large_lr),
    Rule("large-learning-rate-of-tuning", "warning", "docs/causal_lm.md", large_lr_of_tuning),
    Rule("small-learning-rate-of-adapters", "warning", "docs/causal_lm.md", small_lr_of_adapters),
    Rule("swapped-betas", "warning", ADAM_PAPER, swapped_betas),
    Rule("large-eps", "warning", ADAM_PAPER, large_eps),
    Rule("decayed-adapters", "warning", "docs/lora.md", decayed_adapters),
    Rule("scale-of-adapters", "warning", "Kalajdzievski, arXiv:2312.03732", scale_of_adapters),
    Rule("many-passes", "warning", "Muennighoff et al., arXiv:2305.16264", many_passes, "data"),
    Rule("uncompiled-float8", "warning", "docs/optimizations.md", uncompiled_float8),
    Rule("cuda-graphs-with-accumulation", "error", "pytorch#169545", cuda_graphs_with_accumulation),
    Rule("many-compiled-shapes", "warning", "pytorch#174704", many_compiled_shapes),
)
