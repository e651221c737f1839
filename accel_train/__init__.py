"""Training parts for scripts written against ``accelerate.Accelerator``.

Each room stands alone: import the part you need (``accel_train.training.accumulation``,
``accel_train.checkpoints.store``, ...). Nothing is imported here, so that ``import accel_train``
costs nothing.
"""

__version__ = "0.1.0"
