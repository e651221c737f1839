"""The machine as it really is: launch files, processes, devices, signals."""
