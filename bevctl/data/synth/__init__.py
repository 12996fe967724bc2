"""A complete synthetic data set in nuScenes format."""
