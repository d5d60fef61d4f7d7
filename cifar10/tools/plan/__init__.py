"""Says what memory a step takes, and which sections fit."""
