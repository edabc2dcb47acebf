"""What a user types: composed to a config, explained if it is wrong, and written again."""
