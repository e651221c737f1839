"""Adapters in the file format of kohya's sd-scripts, which ComfyUI reads."""
