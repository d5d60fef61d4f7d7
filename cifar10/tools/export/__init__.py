"""Exports the model of a run as a SavedModel or as ONNX."""
