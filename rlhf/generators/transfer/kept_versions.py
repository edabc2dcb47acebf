"""The largest number of weight versions that a store keeps at once. This module imports no torch."""


def most_versions(processes: int, in_flight: bool) -> int:
    """Return the largest number of versions of the weights that are kept for the generator processes.

    A process needs two versions: the weights that it samples with, in case it is lost, and the weights that
    it loads next. With in-flight updates a process may load several versions during one request, and confirms
    them at the end of the request. Two more versions are then kept.

    Args:
        processes: number of generator processes that load the weights from one store.
        in_flight: whether weights change while a request runs (`schedule.update=in_flight`).
    """
    return processes * (4 if in_flight else 2)
