"""Generators in their own processes: both sides of the queue, replicas, annotation."""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config.generators import WorkerConfig, most_versions
from rlhf.config.models import Dtype
from rlhf.core.batch import Batch, Budget, Prompts, Rollouts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.launched import local_rank, local_world_size
from rlhf.core.metrics import How, Metrics, Stat, merge
from rlhf.generators.generator import Generator, GeneratorContext, SamplerFactory, Wrapper, finished
from rlhf.generators.weights import Manifest, SharedWeights, TransferError, WeightStore, confirm
from rlhf.models.forward import infer
from rlhf.processes.ranks import Ranks
from rlhf.processes.signals import call_at_signal, do_not_call_at_signal, left
from rlhf.processes.worker import Channel, Job, Limits, Service, Spawned, Worker, environment, received
from rlhf.scorers.scorer import Scorer
from rlhf.scorers.teacher import Reference, compared_with

# Start of a generator's processes: one sampler process or several replicas, and the annotator process.


def start(
    config: WorkerConfig,
    context: GeneratorContext,
    factory: SamplerFactory,
    variables: Sequence[dict[str, str]],
    store: WeightStore | None = None,
    single: Callable[..., WorkerGenerator] | None = None,
) -> Generator:
    """Start the sampler process of a generator (one per replica), and the annotator if `config.annotates`.

    The annotator process gets as many threads as a sampler process. With `max_lag=1`, sampler and annotator
    run in parallel only while the trainer waits and leaves its cores free. With a larger lag,
    OMP_WAIT_POLICY=PASSIVE makes waiting threads yield their cores. The GPU of the annotator is one that
    neither a rank nor vLLM uses, if there is one, otherwise the GPU of its rank; see `worker_gpu`.

    Args:
        config: the config section of the generator.
        context: the parts and settings that the run provides.
        factory: creates the sampler inside its process.
        variables: environment variables of the sampler process of each replica.
        store: sends weights to the sampler processes; None: through shared memory, in their dtypes. The store
            of replicas is in shared memory.
        single: creates the generator if there is one replica, from the arguments of `WorkerGenerator`; None:
            `WorkerGenerator`.
    """
    limits, log = _limits_and_log("generator", config, context)
    in_flight = context.in_flight
    if config.replicas == 1:
        one = (single or WorkerGenerator)(factory, log, variables[0], limits, in_flight, store)
        return annotated(one, config, context)

    def replica(i: int, weights: SharedWeights) -> Replica:
        own_log = log.with_stem(f"generator-replica{i}") if i else log
        return Replica(factory, own_log, variables[i], limits, in_flight, weights)

    assert store is None or isinstance(store, SharedWeights), "validated: replicas use shared memory"
    return annotated(Replicas(replica, config.replicas, in_flight, store), config, context)


def annotated(generator: Generator, config: WorkerConfig, context: GeneratorContext) -> Generator:
    """Return a generator whose rollouts an annotator process scores, if `config.annotates`."""
    ranks = context.ranks
    if not config.annotates(context.max_lag, ranks.size, ranks.device.type == "cuda"):
        return generator
    limits, log = _limits_and_log("annotator", config, context)
    number = config.replicas * (local_world_size() if config.per_rank else 1) + local_rank()
    reserved = config.reserved_gpus(local_world_size())
    own = environment(context.threads, ranks.device, number, reserved)
    annotator = Worker("annotator", context.annotator, log, own, limits)
    return AnnotatedGenerator(generator, annotator, context.asks_service)


def _limits_and_log(name: str, config: WorkerConfig, context: GeneratorContext) -> tuple[Limits, Path]:
    rank = context.ranks.rank
    start_s = config.start_limit(on_gpu=torch.cuda.is_available())
    limits = Limits(start_s, config.request_limit_s, config.restarts)
    return limits, context.folder / f"{name}{f'-{rank}' if rank else ''}.log"


# Annotation of rollouts in a separate process, the annotator process.
#
# Scores and reference log-probs do not depend on trained weights, so another process can compute them before
# the trainer needs them. The annotator does not share a process with vLLM, which changes classes of
# transformers. `Annotator` runs in the annotator process; `AnnotatedGenerator` runs in the trainer's process.


@dataclass
class Annotator(Service):
    """A service that adds scores and reference log-probs to rollouts, inside the annotator process.

    Args:
        scorer: the scorer of the run.
        reference: the reference model; None: the objective does not need reference log-probs.
        budget: limits of a forward pass of the reference.
        ranks: the annotator process as a single rank, with its device.
        dtype: the dtype of forward passes.
    """

    scorer: Scorer
    reference: Reference | None
    budget: Budget
    ranks: Ranks
    dtype: Dtype

    def annotate(self, rollouts: Rollouts) -> Batch:
        """Return the rollouts as a `Batch` with `scores`, `parts`, what is compared, and `annotate_ahead_s`.

        Raises:
            RunError: the scorer failed; the traceback of its cause is in the log of the annotator process.
        """
        start = time.perf_counter()
        try:
            batch = self.scorer(rollouts)
        except RunError as error:
            if error.__cause__ is None:
                raise
            traceback.print_exception(error.__cause__)
            raise RunError(f"{error} (traceback and output: annotator.log)") from error
        if self.reference is not None:
            ask = partial(infer, budget=self.budget, ranks=self.ranks, dtype=self.dtype)
            batch = replace(batch, **compared_with(self.reference, batch, ask))
        return replace(batch, annotate_ahead_s=time.perf_counter() - start)


class AnnotatedGenerator(Wrapper):
    """A generator that returns training rollouts as a `Batch`, with scores and reference log-probs.

    Args:
        generator: the generator that samples the rollouts.
        annotator: the worker of the annotator process.
        asks_service: whether the scorer of the annotator waits for the answers of a service; a signal then
            ends the annotation.
    """

    def __init__(self, generator: Generator, annotator: Worker, asks_service: bool = False) -> None:
        super().__init__(generator)
        self.annotator = annotator
        self.stopping = False  # a signal has ended the annotation
        if asks_service:
            call_at_signal(self.stop_annotating)

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt; with the purpose "train", the future returns a `Batch`.

        Single responses are not annotated: `resume` annotates the group.

        Raises:
            RunError: the generator failed since the last call.
        """
        sampled = self.generator.submit(prompts, sampling)
        return sampled if sampling.purpose != "train" or sampling.begun else self.annotated(sampled)

    def resume(self, rollouts: Rollouts) -> Future[Rollouts]:
        """Return a future of rollouts of a checkpoint; they are annotated now if they were not before."""
        return finished(rollouts) if isinstance(rollouts, Batch) else self.annotated(finished(rollouts))

    def annotated(self, sampled: Future[Rollouts]) -> Future[Rollouts]:
        """Return a future of the annotated rollouts; after a signal, of the rollouts themselves.

        Args:
            sampled: future of the generator, which also may have an error.
        """
        found: Future[Rollouts] = Future()

        def deliver(answer: Future[Batch]) -> None:
            if (error := answer.exception()) is None:
                found.set_result(answer.result())
            elif self.stopping and sampled.exception() is None:
                found.set_result(sampled.result())
            else:
                found.set_exception(error)

        def annotate(_: Future[Rollouts]) -> None:
            answer: Future[Batch] = Future()
            try:
                answer = self.annotator.put(Job("annotate", (sampled.result(),)))
            except Exception as error:  # `add_done_callback` only logs exceptions of the callback
                answer.set_exception(error)
            answer.add_done_callback(deliver)

        sampled.add_done_callback(annotate)
        return found

    def stop_annotating(self) -> None:
        """End the annotator after a signal, because its scorer may wait for a service.

        From now on, rollouts are returned without annotations. The scorer of the trainer does not score them
        after a signal; they are annotated after the run resumes.
        """
        self.stopping = True
        self.annotator.close()

    def figures(self) -> Metrics:
        """Return the metrics of the generator and of the annotator."""
        return {**self.generator.figures(), **self.annotator.figures()}

    def close(self) -> None:
        """Close the generator, then the annotator, which may get rollouts until the generator is closed."""
        do_not_call_at_signal(self.stop_annotating)
        with ExitStack() as ends:
            ends.callback(self.annotator.close)
            ends.callback(self.generator.close)


# A generator in a separate process, so that sampling and training overlap.
#
#     trainer's thread                 carrier thread                    process (generators/process.py)
#     submit(prompts) ──▶ jobs ──▶ one job at a time ──── sample ────▶ Sampler.sample
#     load(weights)   ──▶ jobs ──▶      "                 load ──────▶ Sampler.load
#     future ◀──────────────────── answer, confirmed ◀─────────────────
#
# Requests and loads are jobs of a `Worker`, first in, first out.
#
# Kept versions: a version stays in its store (in memory, in a folder, or on the GPU) until
# the process has confirmed the next version. So if the process is lost, the weights of its current job still
# exist: they are the weights confirmed last, regardless of the loads in the queue. A new process gets these
# weights, then the lost job; the queue does not change. At most two versions are kept, regardless of
# `schedule.max_lag`: the confirmed version and the version of the next load. If the process has not confirmed
# a load when the trainer wants to send the next one, the trainer waits; the answers of the process wait in
# the trainer. If every request is answered before the next load, as with `max_lag=0`, only one version is
# kept.
#
# In-flight updates (`schedule.update=in_flight`): loads overtake the requests in the queue and the running
# request. The carrier thread sends a load while the request runs, and the answer to the request confirms the
# loads that were executed before its end. The order of the requests does not change. A new process gets the
# weights confirmed last, then the loads that overtook the lost request, then the lost request. At most four
# versions are kept, so up to three loads can overtake one request.


_POLL_S = 0.01  # seconds between checks for loads that overtake a request


class WorkerGenerator(Worker, Generator):
    """A generator whose sampler runs in a separate process.

    After each load the process reports the version and the checksums of its weights. If the report differs
    from the weights that the trainer sent, the run stops: the next call or future raises TransferError. The
    run also stops if the process is lost more often than `limits.restarts`.

    Args:
        factory: creates the sampler in the process.
        log: file for the output of the process.
        environment: environment variables of the process, in addition to those of the trainer.
        limits: time limits, and the maximum number of restarts.
        in_flight: whether loads overtake requests.
        store: store that sends weights to the process; None: shared memory.
    """

    def __init__(
        self,
        factory: SamplerFactory,
        log: Path,
        environment: Mapping[str, str],
        limits: Limits,
        in_flight: bool = False,
        store: WeightStore | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.store = store or SharedWeights()
        self.confirmed: Manifest | None = None  # the weights that the process confirmed last
        self.loads: deque[Manifest] = deque()  # loads that have overtaken requests and are not confirmed yet
        self.load_s = 0.0  # seconds of loading that `figures` has not reported yet
        self.unsent = False  # whether weights could not be sent, though the process ran
        super().__init__("generator", partial(_SamplingService, factory), log, environment, limits)

    # -- the trainer's side ------------------------------------------------------------------------

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt, without waiting for them.

        Raises:
            RunError: the generator has failed.
        """
        return self.put(Job("sample", (prompts, sampling)))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights to the store, and queue a load for the process.

        Raises:
            RunError: the generator has failed, or there is not enough memory.
        """
        with self.lock:
            idle = not self.unanswered  # if idle, no request needs the weights confirmed last
        if idle and self.confirmed is not None:
            self.store.release(self.confirmed)
            self.confirmed = None
        self.wait()
        self.put(Job("load", (self.store.write(weights, version),)))

    def wait(self) -> None:
        """Wait until the store keeps fewer than `most_versions` versions.

        Raises:
            RunError: the generator has failed.
        """
        self.store.wait(most_versions(1, self.in_flight), self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of the generator, if it has failed."""
        with self.lock:
            if self.failure is not None:
                raise self.failure

    def figures(self) -> Metrics:
        """Return the restarts and the seconds of loads between requests, both since the last call."""
        with self.lock:
            seconds, self.load_s = self.load_s, 0.0
        return {**super().figures(), "time/load_s": Stat(seconds, 1.0, How.sum)}

    def close(self) -> None:
        """End the process and free the memory of all versions.

        An idle process releases its resources first; a busy process is killed.
        """
        super().close()
        self.store.close()

    # -- the carrier thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, and load the weights that the previous process confirmed last."""
        super().start()
        if self.confirmed is not None:
            self.hand_over(self.confirmed)

    def do(self, job: Job) -> Any:
        """Execute a job in the process: a load, or a request after the loads that overtook it."""
        if job.method == "load":
            return self.hand_over(*job.arguments)
        self.overtake()
        while self.loads:
            self.hand_over(self.loads[0])
            self.loads.popleft()
        return self.sample(*job.arguments)

    def hand_over(self, manifest: Manifest) -> None:
        """Load weights into the process, and check the version and checksums that the process reports.

        Raises:
            Lost: the process ended, or exceeded the time limit.
            TransferError: version or checksums of the process differ from the weights that were sent.
        """
        start = time.perf_counter()
        assert self.channel is not None and self.process is not None
        offered = self.store.offer(manifest, partial(self.give_up, self.process, self.channel))
        self.check_loaded(manifest, *self.ask("load", offered))
        with self.lock:
            self.load_s += time.perf_counter() - start

    def check_loaded(self, manifest: Manifest, version: int, checksums: dict[str, int]) -> None:
        """Check that the process has loaded the weights that were sent, and release the previous version.

        Raises:
            TransferError: version or checksums of the process differ from the weights that were sent.
        """
        confirm(manifest, version, checksums)
        self.store.finish(manifest)
        if self.confirmed is not None and self.confirmed is not manifest:
            self.store.release(self.confirmed)
        self.confirmed = manifest

    def overtake(self) -> list[Manifest]:
        """With in-flight updates, move all loads from the queue to `loads` and return their manifests."""
        if not self.in_flight:
            return []
        with self.lock:
            manifests = [job.arguments[0] for job in self.jobs if job.method == "load"]
            self.jobs = deque(job for job in self.jobs if job.method != "load")
            self.unanswered -= len(manifests)  # the current request, which is counted, includes these loads
        self.loads += manifests
        return manifests

    def sample(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return the answer of the process to a request; with in-flight updates, also send new loads.

        Raises:
            Lost: the process ended, or exceeded the time limit.
            TransferError: a load was not confirmed, or a token was sampled by a version that was neither
                confirmed before the request nor loaded during the request.
        """
        assert self.confirmed is not None and self.process is not None
        rollouts: Rollouts
        known = [self.confirmed.version]
        with self.lost("sample", self.limits.request_s) as channel:
            end = time.monotonic() + self.limits.request_s
            channel.send(("sample", (prompts, sampling, self.in_flight)))
            while self.in_flight and not channel.answers(_POLL_S):
                if time.monotonic() > end:
                    raise TimeoutError
                for manifest in self.overtake():
                    give_up = partial(self.give_up, self.process, channel)
                    channel.send(("load", (self.store.offer(manifest, give_up),)))
            rollouts, in_time = received(channel)
            late = [received(channel) for _ in range(len(self.loads) - len(in_time))]
        for answer in (*in_time, *late):
            self.check_loaded(self.loads[0], *answer)
            self.loads.popleft()
        known += [version for version, _ in in_time]
        if not rollouts.versions() <= set(known):
            raise TransferError(
                f"a request must be sampled by version {' or '.join(map(str, known))}, the last loaded "
                f"before each token, got version {', '.join(map(str, sorted(rollouts.versions())))}"
            )
        return rollouts

    def give_up(self, process: Spawned, channel: Channel) -> None:
        """Shut the connection to a process to which a thread could not send weights.

        A process that ends within a second is the cause. Otherwise the cause is here, and `check` raises it.
        """
        process.ending()
        self.unsent = process.poll() is None
        channel.shut()

    def check(self) -> None:
        """Raise RunError if weights could not be sent to a process that ran."""
        if self.unsent:
            self.store.check()

    def stop(self) -> None:
        """End the process and abandon all transfers of weights to the process."""
        super().stop()
        self.store.forget()


# The service of a generator process: a sampler and the version of its weights.
#
# With `schedule.update=in_flight`, a `load` may arrive while a `sample` runs. If the load is executed during
# the sample, the answer to the load is part of the answer to the sample. Otherwise the load is answered after
# the sample.


class _SamplingService(Service):
    """A service with the methods of a generator process that the trainer calls.

    Args:
        factory: creates the sampler.
        channel: the connection to the trainer; loads arrive on it during a sample.
    """

    def __init__(self, factory: SamplerFactory, channel: Channel) -> None:
        self.sampler, self.channel = factory.build(), channel
        self.version: int | None = None  # version of the weights; None until a load has ended

    def load(self, manifest: Manifest) -> tuple[int, dict[str, int]]:
        """Load weights into the sampler, and return their version and checksums.

        Raises:
            TransferError: the weights differ from the weights that the trainer sent.
        """
        if manifest.path and not manifest.path.startswith("/proc/"):
            left.add(os.path.dirname(manifest.path))  # a trainer that is killed does not remove it
        self.version = None
        checksums = self.sampler.load(manifest)
        self.version = manifest.version
        return manifest.version, checksums

    def sample(
        self, prompts: Prompts, sampling: Sampling, in_flight: bool
    ) -> tuple[Rollouts, list[tuple[int, dict[str, int]]]]:
        """Return rollouts for the prompts, and the answers to the loads that were executed during sampling.

        Args:
            prompts: the prompts.
            sampling: number of samples, temperature and response length of the request.
            in_flight: whether a load that arrives during the request is executed before the next forward
                pass.

        Returns:
            The rollouts with `version` and `generate_s`, and the result of `load` for each executed load
            (none without `in_flight`).
        """
        assert self.version is not None, "load weights before the first request"
        loads: list[tuple[int, dict[str, int]]] = []

        def update() -> int:
            while self.channel.pending():
                method, arguments = self.channel.receive()
                assert method == "load", "only a load may overtake a request"
                loads.append(self.load(*arguments))
            assert self.version is not None
            return self.version

        start = time.perf_counter()
        rollouts = self.sampler.sample(prompts, sampling, update if in_flight else None)
        seconds = time.perf_counter() - start
        rollouts = replace(rollouts, version=self.version, generate_s=seconds)
        return replace(rollouts, version=min(rollouts.versions())), loads

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()


# Generator replicas: several generator processes that answer the training requests in turn.
#
#     request t ──▶ replica t mod n ──▶ rollouts t
#     load      ──▶ shared memory, one snapshot for all replicas; each loads it before its next request
#
# Each replica processes its jobs first in, first out. Before a request, the replica loads the latest weights
# unless it has already loaded them. So each request is sampled by the same version as with a single
# generator. A load costs the trainer as much as with a single generator, and a replica loads only the
# versions that its requests need. The store keeps at most two versions per replica (`most_versions`),
# regardless of `schedule.max_lag`; if it keeps more, a load waits until a replica has loaded a version.


class Replica(WorkerGenerator):
    """A generator process that shares its weight snapshots with the other replicas.

    The store of snapshots belongs to `Replicas`, which closes the store.
    """

    store: SharedWeights
    given: Manifest | None = None  # the manifest of the last call of `take`

    def take(self, manifest: Manifest) -> None:
        """Queue a load of the weights of `manifest`, unless the last call had the same manifest.

        The weights must be in the shared store.

        Raises:
            RunError: the generator failed since the last call.
        """
        if manifest is not self.given:
            self.store.hold(manifest)
            self.given = manifest
            self.put(Job("load", (manifest,)))

    def close(self) -> None:
        """End the process; the shared store stays open."""
        super(WorkerGenerator, self).close()


class Replicas(Generator):
    """A generator that distributes requests over replicas.

    Training requests go to the replicas in turn. Any other request goes to the replica with the fewest
    unfinished jobs.

    Args:
        start: starts and returns replica i, given i and the store from which the replica loads weights.
        count: number of replicas, at least 2.
        in_flight: whether loads overtake requests; if True, every replica gets every load immediately.
        store: the store of all replicas; None: a store that keeps the dtypes of the weights.
    """

    def __init__(
        self,
        start: Callable[[int, SharedWeights], Replica],
        count: int,
        in_flight: bool,
        store: SharedWeights | None = None,
    ) -> None:
        self.store = store or SharedWeights()
        self.replicas = [start(i, self.store) for i in range(count)]
        self.in_flight = in_flight
        self.latest: Manifest | None = None  # the manifest of the last load

    def submit(self, prompts: Prompts, sampling: Sampling) -> Future[Rollouts]:
        """Request K responses to each prompt, without waiting for them.

        Raises:
            RunError: the replica that gets the request has failed.
        """
        assert self.latest is not None, "load weights before the first request"
        if sampling.purpose == "train":
            replica = self.replicas[sampling.request % len(self.replicas)]
        else:
            replica = min(self.replicas, key=lambda replica: replica.unanswered)
        replica.take(self.latest)
        return replica.submit(prompts, sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights into shared memory once; each replica loads the copy before its next request.

        With `in_flight`, every replica gets the load immediately.

        Raises:
            RunError: there is not enough memory, or a replica has failed.
        """
        if self.latest is not None:
            self.store.release(self.latest)
        self.wait()
        self.latest = self.store.write(weights, version)
        if self.in_flight:
            for replica in self.replicas:
                replica.take(self.latest)

    def wait(self) -> None:
        """Wait until the store keeps fewer than `most_versions` versions.

        Raises:
            RunError: a replica has failed.
        """
        self.store.wait(most_versions(len(self.replicas), self.in_flight), self.raise_failure)

    def raise_failure(self) -> None:
        """Raise the error of the first replica that has failed, if any."""
        for replica in self.replicas:
            replica.raise_failure()

    def figures(self) -> Metrics:
        """Return the merged metrics of all replicas."""
        merged: Metrics = {}
        for replica in self.replicas:
            merge(merged, replica.figures())
        return merged

    def close(self) -> None:
        """End the processes, then free the shared memory."""
        with ExitStack() as ends:
            ends.callback(self.store.close)
            for replica in self.replicas:
                ends.callback(replica.close)
