"""From CIFAR binaries on disk to distorted batches in one prefetch queue per tower."""
