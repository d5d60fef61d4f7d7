"""Everything that a user can set: options, flags and recipes."""
