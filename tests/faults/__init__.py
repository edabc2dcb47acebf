"""Fault injection: random faults in short real runs, each with the outcome that is required.

python -m tests.faults --minutes 20 --seed 7     (make test-faults ARGS="--minutes 20 --seed 7")

catalogue/   the entries: a fault, a command, a moment, the required outcome
runs.py      the commands, and the results by which two runs are compared
workspace.py uninterrupted and crashed runs, made once and copied for each trial
trial.py     carries out one entry: starts the command, injects the fault, checks the outcome
processes.py the processes of a trial and their roles
service.py   a scoring service with faults
inside/      code that runs inside the commands: reports phases, shifts the clock, slows the disk
table.py     the table of results.md
"""
