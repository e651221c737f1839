"""Our own MMDiT, trained by recipes/mmdit.py on captions and pictures, as a base of adapters."""
