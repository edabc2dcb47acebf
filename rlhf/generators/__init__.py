"""Where responses come from: a model that samples them, or a data set that holds them."""
