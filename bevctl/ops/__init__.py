"""Tensor operations: one public function each, with its plain torch implementation."""
