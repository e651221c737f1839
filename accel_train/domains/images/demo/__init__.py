"""Pictures without a download: the bundled emoji, and generated shapes with checkable captions."""
