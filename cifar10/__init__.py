"""Train an image classifier on several GPUs by synchronous data parallelism."""
