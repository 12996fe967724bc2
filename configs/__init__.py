"""Packaged configs, installed as `bevctl.configs`."""
