"""Training parts for scripts written against ``accelerate.Accelerator``.

Each package stands alone: import the part you need (``accel_train.training.accumulation``,
``accel_train.store.commit``, ...). Nothing is imported here, so that ``import accel_train``
costs nothing.
"""

__version__ = "0.1.0"
