"""Data sets of pictures: a folder, an .npz file, or a name of TensorFlow Datasets."""
