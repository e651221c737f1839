"""``python -m accel_train``: the command ``accel-train``."""

from __future__ import annotations

import sys

from accel_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
