"""Stands for mmdet3d."""
