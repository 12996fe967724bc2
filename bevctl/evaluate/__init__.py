"""Detection and map metrics, and pictures of predictions."""
