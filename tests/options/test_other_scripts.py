"""Options of other scripts: every remedy is an option that exists, with a value that it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accel_train.commands.bundled import import_recipe
from accel_train.config import UsageError
from accel_train.options.flags import read_flags, refusal
from accel_train.options.loading import load_config
from accel_train.options.other_scripts import NAMES_OF_OTHER_SCRIPTS, in_this_recipe
from accel_train.options.tree import option_types

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
RECIPES: dict[str, Any] = {path.stem: import_recipe(path).Config for path in sorted((ROOT / "recipes").glob("*.py"))}
KINDS = {name: option_types(config) for name, config in RECIPES.items()}
DEMOS = {"lora": "lora_demo", "causal_lm": "causal_lm_demo", "mmdit": "demo"}
OF_SAMPLING = {"text", "prompt"}
"""Options of ``accel-train sample``."""
OPTION = re.compile(r"--([a-z_0-9.]*[a-z0-9])(?: (?!and |or )([\w|.]+)(?=$|,|:|;| --| and | or | \())?")
"""An option of a remedy, and its value or several, divided by bars."""


def given(remedy: str) -> list[tuple[str, list[str]]]:
    """Return the options of a remedy with the values that it names, none for words of a sentence."""
    found: list[tuple[str, list[str]]] = []
    for name, values in OPTION.findall(remedy):
        found.append((name, values.split("|") if values else []))
    return found


def test_options_are_found_in_a_sentence() -> None:
    assert given("--a.b x|y, and --c for d, --e_f 0 and --g and --h (some)") == [
        ("a.b", ["x", "y"]),
        ("c", []),
        ("e_f", ["0"]),
        ("g", []),
        ("h", []),
    ]


@pytest.mark.parametrize("name", NAMES_OF_OTHER_SCRIPTS)
def test_every_remedy_is_an_option_with_a_value_that_it_takes(name: str) -> None:
    remedy = NAMES_OF_OTHER_SCRIPTS[name]
    options = given(remedy)
    assert options or not remedy.startswith("--")
    assert remedy.count("--") == len(options)
    for option, values in options:
        owners = [kinds for kinds in KINDS.values() if option in kinds]
        assert owners or option in OF_SAMPLING, option
        for kinds in owners:
            for value in values:
                read = read_flags(kinds, [f"--{option}", value], list)
                assert refusal(kinds[option], read[option]) is None, (option, value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_name_of_other_scripts_is_an_option_here(recipe: str) -> None:
    assert not NAMES_OF_OTHER_SCRIPTS.keys() & KINDS[recipe].keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_option_is_proposed_only_to_a_recipe_that_has_one(recipe: str) -> None:
    known = list(KINDS[recipe])
    for name, remedy in NAMES_OF_OTHER_SCRIPTS.items():
        names = {option for option, _ in given(remedy)}
        said = in_this_recipe(remedy, known)
        if remedy.startswith("none: "):
            assert said == f"there is {remedy}", name
        else:
            assert said.startswith("use ") == (not names or bool(names & set(known))), name


@pytest.mark.parametrize(
    ("recipe", "flag", "says"),
    [
        ("lora", "--shuffle_caption", "there is none: not available in this recipe, captions are learned as they are"),
        ("lora", "--keep_tokens", "there is none: not available in this recipe"),
        ("lora", "--clip_skip", "there is none: not available in this recipe"),
        ("lora", "--max_token_length", "there is none: not available in this recipe"),
        ("lora", "--scale_weight_norms", "there is none: not available in this recipe"),
        ("lora", "--min_timestep", "there is none: not available in this recipe"),
        (
            "lora",
            "--v_parameterization",
            "no option corresponds to it (other recipes have --latent.prediction for a model",
        ),
        ("mmdit", "--prediction_type", "use --latent.prediction"),
        ("lora", "--random_crop", "use --data.crop random"),
        ("lora", "--logit_mean", "use --times.logit_mean with the other sign"),
        ("lora", "--discrete_flow_shift", "use --times.shift, which comes on top of the shift of the base's"),
        ("lora", "--allow_tf32", "there is none: matrix products in fp32 are never rounded to TF32"),
        ("lora", "--revision", "use --base.revision for a pipeline"),
        ("causal_lm", "--revision", "use "),
        ("lora", "--num_validation_images", "use --evaluation.prompts: one picture each"),
        ("lora", "--sigmoid_scale", "use --times.logit_std, with --times.density logit_normal"),
        ("lora", "--train_unet_only", "use --text_encoders.rank 0"),
        ("lora", "--conv_dim", "there is none: adapters are on linear layers alone"),
        ("lora", "--secondary_separator", "there is none: not available in this recipe, captions are learned as"),
        ("lora", "--token_warmup_step", "there is none: not available in this recipe, captions are learned as"),
        ("lora", "--v_pred_like_loss", "there is none: not available"),
        ("lora", "--scale_v_pred_loss_like_noise_pred", "there is none: not available"),
        ("lora", "--d_coef", "use --optimizer.arguments d_coef=0.5"),
        ("lora", "--lowram", "there is none: not available"),
        ("lora", "--persistent_data_loader_workers", "there is none: workers of the loader always stay"),
        ("lora", "--block_lr_zero_threshold", "there is none: a block is left out if --lora.targets"),
        ("lora", "--use-dora", "use --lora.variant dora"),
        ("lora", "--network_weights", "use --init_from, with the file converted first"),
        ("lora", "--instance_prompt", "use --data.default_caption"),
        ("lora", "--class_prompt", "use --data.prior.caption"),
        ("lora", "--dataset_config", "use --data.path and other options of data"),
        ("lora", "--lr_num_cycles", "use --schedule.cycles"),
        ("causal_lm", "--max_seq_length", "use --data.max_length"),
        ("causal_lm", "--packing", "use --data.packing"),
        ("causal_lm", "--lora_r", "use --lora.rank"),
        ("causal_lm", "--load_in_4bit", "use --lora.base_precision nf4"),
        ("causal_lm", "--logging_steps", "use --log.log_every"),
        ("causal_lm", "--eval_steps", "use --evaluation.every"),
        ("causal_lm", "--push_to_hub", "use --hub.repo_id"),
        ("causal_lm", "--warmup_ratio", "use --schedule.warmup_steps, a number of steps"),
        ("causal_lm", "--assistant_only_loss", "there is none: in completions and chats, only what the model is to"),
        ("causal_lm", "--use_liger_kernel", "use --model.loss_chunk 1024 (tokens whose logits"),
        ("causal_lm", "--liger_fused_linear_cross_entropy", "use --model.loss_chunk 1024"),
        ("causal_lm", "--chunked_cross_entropy", "use --model.loss_chunk 1024"),
        ("lora", "--use_liger_kernel", "no option corresponds to it (other recipes have --model.loss_chunk 1024"),
        ("causal_lm", "--random_crop", "no option corresponds to it (other recipes have --data.crop random)"),
    ],
)
def test_it_is_refused_with_the_name_used_here(recipe: str, flag: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{flag} is a name from other scripts; here {says}")):
        load_config(RECIPES[recipe], [flag, "1"], presets=PRESETS, default_preset=DEMOS[recipe])


def test_a_value_in_the_form_of_other_scripts_is_refused_with_the_form_used_here() -> None:
    says = (
        r"resolutions: '512,512' is refused: .*; correct --data\.resolutions\. Give numbers separated by spaces; "
        r"each is the side of a square, such as 512 for 512,512$"
    )
    with pytest.raises(UsageError, match=says):
        load_config(RECIPES["lora"], ["--data.resolutions", "512,512"], presets=PRESETS, default_preset=DEMOS["lora"])
    with pytest.raises(UsageError, match=r"512 512: each may be given only once, .* give --data\.resolutions 512$"):
        load_config(
            RECIPES["lora"], ["--data.resolutions", "512", "512"], presets=PRESETS, default_preset=DEMOS["lora"]
        )
