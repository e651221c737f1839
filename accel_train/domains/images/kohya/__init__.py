"""Adapters in the file format of kohya's sd-scripts, also read by ComfyUI."""
