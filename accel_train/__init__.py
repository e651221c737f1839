"""Training parts for scripts written against ``accelerate.Accelerator``.

Import the part you need (``accel_train.training.accumulation``, ``accel_train.store.commit``, ...); none needs a
recipe, and CONTRIBUTING.md says which packages import which others. Nothing is imported here, so that
``import accel_train`` costs nothing. ``load`` opens a trained model and is imported on first access.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_train.loading import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from accel_train.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
