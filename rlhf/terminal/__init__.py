"""What the screen shows: messages, output of commands, progress."""
