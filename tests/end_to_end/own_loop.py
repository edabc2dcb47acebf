"""The loop with a loss of its own of docs/python.md, for runs on several ranks."""

import torch


def clipped(logprobs, batch):
    ratio = (logprobs - (logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs)).exp()
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)


def loop(session):
    for rollouts in session.sample():
        batch = session.annotate(session.score(rollouts))
        for minibatch in session.minibatches(session.credit(batch)):
            session.forward_backward(minibatch, clipped)
            session.step()
        session.sync(batch)
