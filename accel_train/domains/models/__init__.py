"""Models and layers. Plain torch."""
