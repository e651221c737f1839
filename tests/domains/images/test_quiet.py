"""The first lines of a run are its own."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.models.pretrained import OF_OPTIONAL_PACKAGES


@pytest.mark.parametrize("name", [*OF_OPTIONAL_PACKAGES, "torchao.kernel.intmm", "bitsandbytes.backends.cpu.ops"])
def test_optional_packages_are_not_named_and_errors_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    level = logger.getEffectiveLevel()
    with quiet():
        logger.warning("a kernel is missing")
        logger.error("a failure")
    assert caplog.messages == ["a failure"]
    assert logger.getEffectiveLevel() == level


def test_a_block_inside_another_leaves_its_bars_off() -> None:
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    def bars() -> list[bool]:
        return [library.is_progress_bar_enabled() for library in (of_diffusers, of_transformers)]

    before = bars()
    with quiet():
        with quiet():
            pass
        assert bars() == [False, False]
    assert bars() == before


@pytest.mark.slow  # the import of diffusers; each logger that it would write by is silenced above
def test_an_import_of_diffusers_writes_nothing() -> None:
    code = """
import logging
logging.basicConfig(level=logging.WARNING)
from accel_train.domains.images.pipelines.components import quiet
with quiet():
    from diffusers import DiffusionPipeline
"""
    # Not forked: diffusers may be imported there.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
