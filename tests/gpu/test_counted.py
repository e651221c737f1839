"""The file of simulations and plans has what the tests of a GPU ask for, as counted now."""

from __future__ import annotations

import pytest

from tests.gpu import counted
from tests.planning.same_counts import assert_same_counts


def test_the_file_has_every_entry() -> None:
    assert counted.read().keys() == counted.entries().keys(), "run: python -m tests.gpu.counted"


def test_each_configuration_is_one_that_a_recipe_takes() -> None:
    """On any machine: an option that was renamed would only show on a GPU."""
    from accel_train.commands.bundled import find_recipe, import_recipe
    from accel_train.options.loading import config_of

    for key, (line, gib) in counted.entries().items():
        recipe, *flags = line.split()
        given = [*flags, *(counted.RUN if gib is None else ())]
        assert config_of(import_recipe(find_recipe(recipe)).main, given) is not None, key


@pytest.mark.slow  # ten seconds each
@pytest.mark.parametrize("key", counted.entries())
def test_an_entry_is_found_again(key: str) -> None:
    # Otherwise run: python -m tests.gpu.counted
    assert_same_counts(counted.found_again(key), counted.read()[key])
