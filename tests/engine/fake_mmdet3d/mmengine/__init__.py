"""Stands for mmengine."""
