"""The folder of a run on disk: file layout, resuming, environment record, log files, full disks."""
