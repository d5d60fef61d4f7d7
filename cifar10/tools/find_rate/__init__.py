"""Finds learning rates to try, by a short training whose rate rises."""
