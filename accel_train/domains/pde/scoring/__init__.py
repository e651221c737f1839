"""What an evaluation of predicted fields scores: chosen rows and trajectories, and their rollouts."""
