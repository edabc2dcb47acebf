"""The atlas: how much each method loses on old samples, with several seeds and intervals (`make atlas`).

    design.py     methods, tasks, lags, minibatches, seeds, learning rates: plain data
    plan.py       the runs of each part of the study, and the CPU time that they are expected to need
    rates.py      the choice of the learning rate of each method, from runs with other seeds
    record.py     the file of results, with one row per run
    worker.py     carries out runs, one after the other, in one process
    executor.py   one or two worker processes, progress, resuming
    analysis.py   differences within seeds, values at a KL, slopes: functions of numbers
    study.py      the rows of a design, as values per method, lag and seed
    findings.py   which differences are supported, only suggested, or undecided
    claims.py     the claims of the paper and the goals, each with a verdict
    page.py       tables and findings in Markdown
    figure.py     the figure
    rerun.py      one run again, compared with its row

`design`, `plan`, `rates`, `record` and `executor` import no torch.
"""
