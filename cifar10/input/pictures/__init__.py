"""Data sets of pictures: a folder, or an .npz file."""
