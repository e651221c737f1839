"""A checkpoint on the disk: commit, verification, weights, retention. No processes."""
