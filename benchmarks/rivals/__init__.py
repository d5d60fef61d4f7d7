"""Who is measured: one module for each way to train the same network.

A module here has one function, `start`, which takes the options of its rows by keyword
and returns an object with

- `precision`: the type of its convolutions and matrix products, such as "float32";
- `check(values, images, labels)`: sets the variables to `values` and returns the total
  loss, a float, and the gradients on one batch; both dictionaries are of float32 arrays
  with our names and shapes, as in "conv1/kernel";
- `run(untimed, timed)`: trains on `untimed` batches and then on `timed` more, and
  returns the seconds that the latter took.

It runs in a process of its own (`benchmarks.runner`), so that rivals share neither
threads nor settings, and its libraries are imported there alone: where one is missing,
only its own rows say so.

`recipe` and `airbench`, the rows of `benchmarks.time_to_94`, train to the end instead,
and their `check` also returns the values after the first update.
"""
