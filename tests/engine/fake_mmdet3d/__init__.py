"""Packages with the names and the interface of mmengine and mmdet3d, as far as bevctl uses them, and a toy detector.

Put this folder on the path to import them as `mmengine` and `mmdet3d`.
"""
