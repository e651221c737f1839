"""What is trained. Plain torch: nothing here knows of processes or files."""
