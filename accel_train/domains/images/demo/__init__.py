"""Pictures without a download: the bundled emoji, and generated shapes whose captions can be checked."""
