"""Trains: puts data, model, towers and the loop together."""
