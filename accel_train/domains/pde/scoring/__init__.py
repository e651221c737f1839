"""Choice of the rows and trajectories that an evaluation scores, and their rollouts."""
