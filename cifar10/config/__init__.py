"""What a user may decide: the flags, recipes of them, and the command line."""
