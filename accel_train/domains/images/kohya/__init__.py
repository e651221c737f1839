"""Adapters in files of other programs: the names of kohya's sd-scripts and ComfyUI, and what such files become here."""
