"""Every configuration key: sections, composition, error messages for wrong keys. Imports no torch."""
