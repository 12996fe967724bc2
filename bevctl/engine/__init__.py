"""The training loop and what it needs: precision, optimizer, checkpoints, processes."""
