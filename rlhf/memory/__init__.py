"""What a run needs of each device's memory, estimated before anything is loaded, without torch."""
