"""Tests of ``accel_train.rerun.upgrade``."""
