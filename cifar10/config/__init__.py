"""Everything that a user may set: flags, recipes, and the command line."""
