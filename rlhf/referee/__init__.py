"""The referee: recompute a training step that any framework dumped, and name the first term that is wrong."""
