"""Studies: many runs that differ in a method, a setting and a seed, and what their values support."""
