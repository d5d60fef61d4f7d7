"""What a live copy of the model consists of."""
