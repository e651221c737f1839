"""The running machine: the Accelerator, processes, devices, signals."""
