"""``python -m accel_train.cli``."""

from __future__ import annotations

import sys

from accel_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
