"""Console and log without the chatter of diffusers and transformers."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

OF_OPTIONAL_PACKAGES = ("bitsandbytes", "torchao", "torch.utils._pytree", "transformers.utils.import_utils")
"""Loggers that name, at an import, optional packages and kernels that are missing. A run that asks for one is refused
by name, and for any other they are ten lines before the first of the run.
"""


@contextmanager
def quiet() -> Generator[None]:
    """Silence diffusers and transformers: no progress bars, no notices of omissions or of optional packages."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    loggers = [logging.getLogger(name) for name in OF_OPTIONAL_PACKAGES]
    levels = [logger.level for logger in loggers]
    level = of_diffusers.get_verbosity()
    of_diffusers.set_verbosity_error()
    of_diffusers.disable_progress_bar()
    of_transformers.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        of_diffusers.set_verbosity(level)
        of_diffusers.enable_progress_bar()
        of_transformers.enable_progress_bar()
