"""Samples: info files, reading, augmentation, loading, the synthetic set."""
