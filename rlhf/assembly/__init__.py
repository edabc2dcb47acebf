"""The only folder that turns the whole config into parts."""
