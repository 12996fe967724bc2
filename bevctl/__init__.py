"""bevctl trains bird's-eye-view perception models in mixed precision and keeps the run healthy."""

__version__ = "0.1.0"
