"""Orders that keep samples together: of one length, one shape or one task."""
