"""The process: how it starts and ends, its signals, its streams and its files."""
