"""The configuration: sections with all keys, composition, error messages. This package imports no torch."""
