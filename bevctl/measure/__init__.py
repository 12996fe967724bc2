"""Instruments that say what a model costs."""
