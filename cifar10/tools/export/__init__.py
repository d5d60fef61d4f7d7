"""Takes the model out of a run: SavedModel and ONNX, checked before it says done."""
