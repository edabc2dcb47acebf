"""What judges responses: a reward model, a program, or the labels of a data set."""
