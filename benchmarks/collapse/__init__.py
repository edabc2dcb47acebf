"""The study of the collapse warning: limits selected on one half of many runs, measured on the other."""
