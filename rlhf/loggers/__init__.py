"""Where metrics go: files, experiment trackers, the terminal."""
