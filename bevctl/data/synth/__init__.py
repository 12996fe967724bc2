"""A complete synthetic data set in nuScenes format: `make_dataset(root, SynthOptions())`."""

from bevctl.data.synth.dataset import make_dataset
from bevctl.data.synth.options import SynthOptions, SynthSummary

__all__ = ["SynthOptions", "SynthSummary", "make_dataset"]
