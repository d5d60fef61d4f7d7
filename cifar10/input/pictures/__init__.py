"""Data sets of pictures: a folder, or a file of arrays."""
