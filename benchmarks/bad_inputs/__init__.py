"""A collection of wrong or unusual inputs, and a program that runs each input and tabulates the result."""
