"""Lines of the package and what they are changed to. The old line must be in its file exactly once.

Each change makes a result silently wrong, so a fast test of the nearest files must fail. A row with a reason
(`harmless`) is a change that no test can or should notice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed line."""

    file: str  # below rlhf/
    old: str  # the line, without indentation
    new: str  # in its place; "": the line is removed
    tests: tuple[str, ...]  # test files that may notice
    harmless: str = ""  # why it need not be noticed


def _rows(tests: str, file: str, *changes: tuple[str, str] | tuple[str, str, str]) -> list[Mutant]:
    """Return the rows of a file; `tests`: names of test files below tests/, without ".py"."""
    paths = tuple(f"tests/{name}.py" for name in tests.split())
    return [Mutant(file, old, new, paths, *harmless) for old, new, *harmless in changes]


CLOCK = "training/test_clock"
MUTANTS = [
    # -- training ------------------------------------------------------------------------------------
    *_rows(
        "training/test_replay",
        "training/stream.py",
        (
            "return replace(batch, token_versions=batch.version * batch.response_mask.long())",
            "return replace(batch, token_versions=batch.trainer_version * batch.response_mask.long())",
        ),
        ("self.earlier.append(new)", "self.earlier.append(batches[0])"),
        (
            'draw = torch.Generator().manual_seed(derive(self.seed, "replay", new.trainer_version))',
            'draw = torch.Generator().manual_seed(derive(self.seed, "replay", 0))',
        ),
        ("age = mean(new.trainer_version - versions)", "age = mean(new.version - versions)"),
    ),
    *_rows(
        CLOCK,
        "training/clock.py",
        ("self._ahead.clear()", ""),
        ("continue  # the choice may have freed slots, or room for further groups", "pass"),
        ("if self.load_at <= first:", "if self.load_at < min(scored_at, ends_at):"),
        ("_DIGITS = 6", "_DIGITS = 300"),
        ("self.resumes = self.now + self.costs.pause_s", "self.resumes = self.now"),
        ("self._news |= not self.whole", ""),
        ("self.usage.busy += passed * len(self.running)", "self.usage.busy += passed * self.slots"),
        (
            "self.usage.wasted += sequence.end - sequence.start",
            "self.usage.wasted += self.now - sequence.start",
        ),
        ("sequence.cut = not sequence.stopped", "sequence.cut = True"),
        (
            "self.scoring.append((self.now + self.costs.score_s, group))",
            "self.scoring.append((self.now, group))",
        ),
        ("sequence.kept = sequence.done(self.step)", "sequence.kept = len(sequence.ids)"),
    ),
    *_rows(
        CLOCK,
        "training/clock.py",
        ("if not self.drops:", "if True:"),
        (
            "most = 0 if self.trains and not self.max_lag else self.batch * (self.max_lag + 1)",
            "most = self.batch * (self.max_lag + 1)",
        ),
        ("if self.max_age is None or self.stale is Stale.drop:", "if self.max_age is None:"),
        ("for j in range(self.max_age):", "for j in range(1):"),
        (
            "most = self.batch * (self.version + self.max_lag + 1)",
            "most = self.batch * (self.version + self.max_lag + 2)",
        ),
        (
            "return found if all(group.begun == self.samples for group in found) else []",
            "return found",
        ),
        ("if self.refilled - self.before >= self.refill:", "if self.refilled - self.before > self.refill:"),
        ("place = self.started + self.refilled - 1", "place = number"),
        ("self.before, self.trains = self.refilled, False", "self.trains = False"),
    ),
    *_rows(
        CLOCK,
        "training/clock.py",
        ("return min(len(self.ids), max(self.kept, tokens))", "return min(len(self.ids), tokens)"),
        ("while self.rewards and tokens and self.versions[tokens - 1] == MESSAGE:", "while False:"),
        ("self.ended = self.stopped = False", "self.stopped = False"),
    ),
    *_rows(
        "training/test_virtual",
        "training/events.py",
        ("version=int(seen.min()),", "version=int(seen.max()),"),
        ("numbers.append(uniform[group][sample, len(ids) :])", "numbers.append(uniform[group][sample, :])"),
        ("self.known[by] = self.drawn(self.spare)", "self.known[by] = self.drawn(self.next)"),
        ("while len(self.next) < soon:", "while False:"),
        (
            "self.forget(own, fate, ready=max(each.end for each in own) + scoring_s, **times)",
            "self.forget(own, fate, ready=max(each.end for each in own), **times)",
        ),
    ),
    *_rows(
        "training/test_ruled training/test_completed",
        "training/events.py",
        (
            '"rollouts/queue": Stat(usage.queue / span),',
            '"rollouts/queue": Stat(usage.queue / max(usage.busy, 1e-9)),',
        ),
        (
            '"rollouts/lag_p90": Stat(float(ages[-1 - len(ages) // 10])),',
            '"rollouts/lag_p90": Stat(float(ages[-(len(ages) // 10)])),',
        ),
        (
            "every = (kept * len(groups) + usage.wasted) / (len(groups) + lost)",
            "every = (kept * len(groups) + usage.wasted) / len(groups)",
        ),
        (
            "self.known[group] = self.drawn(self.discards or self.next)",
            "self.known[group] = self.drawn(self.next)",
        ),
    ),
    *_rows(
        "training/test_completed",
        "training/events.py",
        ("if not ended:", "if True:"),
        ("self._work()  # what was discarded or taken makes room", ""),
        ("what.cut &= not bool(rollouts.ended)", "what.cut = not bool(rollouts.ended)"),
    ),
    *_rows(
        "training/test_refill",
        "training/stream.py",
        ("return scores.amax(1) > scores.amin(1)", "return scores.amax(1) >= scores.amin(1)"),
    ),
    *_rows(
        "training/test_collapse",
        "training/recorder.py",
        ('value += row.get("mismatch/kl", 0.0)', "pass"),
        ("value -= self.first.setdefault(name, value)", "self.first.setdefault(name, value)"),
    ),
    *_rows(
        "training/test_evaluators",
        "training/evaluators.py",
        (
            "wins = (gold > reference).double().mean().item()",
            "wins = (gold >= reference).double().mean().item()",
        ),
        (
            'nll = -engine.infer(engine.reference.at(temperature=1.0), rollouts, "logprobs").double().sum()',
            'nll = -engine.infer(engine.reference, rollouts, "logprobs").double().sum()',
        ),
        (
            '**rate("eval/accuracy", (margins > 0).double().mean().item(), count),',
            '**rate("eval/accuracy", (margins >= 0).double().mean().item(), count),',
        ),
    ),
    *_rows(
        "training/test_recorder",
        "training/recorder.py",
        (
            "lag = state.lag + rollouts.version - rollouts.token_versions",
            "lag = state.lag - rollouts.token_versions",
        ),
        (
            "state.best = min(best, value) if self.minimised else max(best, value)",
            "state.best = max(best, value)",
        ),
    ),
    # -- environments --------------------------------------------------------------------------------
    *_rows(
        "environments/test_episodes",
        "environments/episodes.py",
        ("episode.rewards[-1] = answer.reward", "episode.rewards[0] = answer.reward"),
        ('episode.figures["turns"] += not episode.open', 'episode.figures["turns"] += 1'),
        ("environment_mask=real & ~sampled,", "environment_mask=real,"),
        (
            "return self.heads[i // self.sampling.samples] + self._all[i].ids",
            "return self.heads[i % len(self.heads)] + self._all[i].ids",
        ),
        (
            "if len(message) >= self.sampling.response_length - len(episode.ids):",
            "if len(message) > self.sampling.response_length - len(episode.ids):",
        ),
        ("new = [getattr(each, column)[each.before :] for each in self._all]", "new = list(rows)"),
        ("record=deepcopy(records[n]),", "record=records[n],"),
    ),
    *_rows(
        "environments/test_turns",
        "environments/environment.py",
        ("self._control -= {tokenizer.unk_token_id} - {tokenizer.eos_token_id}", ""),
        (
            "kept = kept * (self.limit - 1) // len(ids)",
            "kept = kept * self.limit // len(ids) - 1",
            "another length of the kept text, still at most the limit",
        ),
    ),
    # -- scorers -------------------------------------------------------------------------------------
    *_rows(
        "scorers/test_scorers scorers/test_ties",
        "scorers/scorer.py",
        (
            "return scores if penalty is None else torch.where(ended, scores, scores - penalty)",
            "return scores if penalty is None else torch.where(ended, scores, -penalty)",
        ),
        (
            "return torch.where(ended | scores.isnan(), scores, replacement)",
            "return torch.where(ended | scores.isnan(), replacement, scores)",
        ),
        (
            "first.setdefault((row // K, end, ids.tobytes()), row % K)",
            "first.setdefault((row // K, True, ids.tobytes()), row % K)",
        ),
        (
            "mask = (text & ~(last & rollouts.ended[..., None])).flatten(0, 1)",
            "mask = (text & ~last).flatten(0, 1)",
        ),
    ),
    *_rows(
        "scorers/test_mixture",
        "scorers/scorer.py",
        (
            "found[rows] = scorer.config.weight * own.to(found.device, found.dtype)",
            "found[rows] = own.to(found.device, found.dtype)",
        ),
    ),
    *_rows(
        "scorers/test_scorers scorers/test_ties",
        "scorers/scorer.py",
        (
            "return self.at_end(self.total(parts, rollouts), rollouts), parts",
            "return self.total(parts, rollouts), parts",
        ),
    ),
    *_rows(
        "scorers/test_scorers",
        "scorers/scorer.py",
        (
            "over = rollouts.real.sum(-1) - self.response_length + config.overlong_buffer",
            "over = rollouts.real.sum(-1)",
        ),
    ),
    *_rows(
        "tasks/test_prompt_order",
        "tasks/task.py",
        (
            "away = np.nan_to_num(np.abs(scores - self.pass_rate).round(1), nan=-1.0)",
            "away = np.nan_to_num((scores - self.pass_rate).round(1), nan=-1.0)",
        ),
    ),
    *_rows(
        "objectives/test_advantages",
        "objectives/advantages.py",
        (
            "std = away.norm(dim=1, keepdim=True) * torch.rsqrt((count - 1).clamp(min=1))",
            "std = away.norm(dim=1, keepdim=True) * torch.rsqrt(count.clamp(min=1))",
        ),
    ),
    *_rows(
        "training/test_evaluators",
        "training/evaluators.py",
        (
            "passed = [1 - math.comb(n - c, k) / math.comb(n, k) for c in (scores == 1).sum(1).tolist()]",
            "passed = [1 - ((n - c) / n) ** k for c in (scores == 1).sum(1).tolist()]",
        ),
    ),
    *_rows(
        "scorers/test_tries",
        "scorers/http.py",
        (
            "elif isinstance(error, Again) and tries[call.key] <= retries:",
            "elif isinstance(error, Again) and tries[call.key] < retries:",
        ),
        ("error = Again(late()) if call.late else call.error", "error = call.error"),
    ),
    # -- study ---------------------------------------------------------------------------------------
    *_rows(
        "study/test_page",
        "study/rows.py",
        (
            "len({(each[seed].task, each[seed].machine, *sorted(each[seed].models.items())) "
            "for each in rows})",
            "len({(each[seed].task, each[seed].machine) for each in rows})",
        ),
        ("if row.status == FAILED:", "if row.status in (FAILED, DIVERGED):"),
        (
            "return [Term(sign, base, Quantity.VALUE), Term(-sign, cell, Quantity.VALUE)]",
            "return [Term(1.0, base, Quantity.VALUE), Term(-1.0, cell, Quantity.VALUE)]",
        ),
        ("x = np.log2(np.asarray(levels, float))", "x = np.asarray(levels, float)"),
        (
            "value = task.worst if row.status == DIVERGED else row.metrics.get(metric)",
            "value = row.metrics.get(metric)",
        ),
        ("start, end = max(0.0, before) ** power, after**power", "start, end = max(0.0, before), after"),
        (
            "return math.hypot(*(w * x.std(ddof=1) for w, x in zip(self.weights, self.apart, strict=True)))",
            "return math.hypot(*(w * x.std() for w, x in zip(self.weights, self.apart, strict=True)))",
        ),
        (
            "self.seeds |= dict.fromkeys(own.values(), len(spec.seeds))",
            "self.seeds |= dict.fromkeys(own.values(), 1)",
        ),
    ),
    *_rows(
        "study/test_page",
        "study/rows.py",
        ("below = holm(below)", "pass"),
        (
            "above, below, contrasts = [holm(above)[place]], [below[place]], {chosen: contrasts[chosen]}",
            "above, below, contrasts = [above[place]], [below[place]], {chosen: contrasts[chosen]}",
        ),
        (
            "contrasts, limit = {name: -each for name, each in contrasts.items()}, -limit",
            "contrasts = {name: -each for name, each in contrasts.items()}",
        ),
        (
            "return decided(contrasts, limit, results.level, chosen=chosen, within=within), numbers, about",
            "return decided(contrasts, limit, 0.05, chosen=chosen, within=within), numbers, about",
        ),
        (
            "return [term._replace(weight=weight / len(tasks) * term.weight) for term in parts]",
            "return [term._replace(weight=weight * term.weight) for term in parts]",
        ),
    ),
    *_rows(
        "study/test_planning",
        "study/plan.py",
        (
            "means = {each: task.sign * fmean(found) for each, found in values.items()}",
            "means = {each: fmean(found) for each, found in values.items()}",
        ),
        (
            "values[run.tuned].append(value if row.status == FINISHED else task.worst)",
            "values[run.tuned].append(value)",
        ),
        ("edge=beyond is not None,", "edge=False,"),
    ),
    # -- servers and transfer ------------------------------------------------------------------------
    *_rows(
        "generators/test_transfer",
        "generators/weights.py",
        (
            "if (computed := _digest(data.numpy().data)) != entry.checksum:",
            "if (computed := _digest(data.numpy().data)) is None:",
        ),
        ("offset = -(-end // _ALIGNMENT) * _ALIGNMENT", "offset = end"),
        ("self.holders[manifest.path] += 1", "self.holders[manifest.path] = 1"),
    ),
    *_rows(
        "generators/test_transfer",
        "generators/weights.py",
        ("for name in sent.keys() | taken.keys():", "for name in taken.keys():"),
    ),
    *_rows(
        "generators/test_worker_extension",
        "generators/vllm/worker_extension.py",
        (
            "self.taken = {name: checksum(tensor) for name, tensor in weights}",
            "self.taken = {entry.name: entry.checksum for entry in entries}",
        ),
        ("_check_reached(self.model, loaded)", ""),
    ),
    *_rows(
        "generators/test_server_pool",
        "generators/servers/pool.py",
        (
            "known = [before] if work.version is not None else range(before, max(self.manifests) + 1)",
            "known = [before] if work.version is not None else range(0, max(self.manifests) + 1)",
        ),
        ("if fit := [each for each in able if work.version in (None, each.version)]:", "if fit := able:"),
        ("needed |= {server.loading.version for server in self.servers if server.loading}", ""),
        (
            "version = min(needed, default=max(self.manifests))",
            "version = max(needed, default=max(self.manifests))",
        ),
        ("if not reply.ended and not work.request.is_cut:", "if False:"),
    ),
    *_rows(
        "generators/test_server_pool",
        "generators/servers/pool.py",
        (
            "oldest = min(version for each in versions for version in each)",
            "oldest = max(version for each in versions for version in each)",
        ),
        ("k = self.sampling.begun[i].sample if self.sampling.begun else i % K", "k = i % K"),
    ),
    # -- ensembles, label noise, best of n -----------------------------------------------------------
    *_rows(
        "scorers/test_ensembles",
        "scorers/scorer.py",
        ("return members.amin(0)", "return members.amax(0)"),
        (
            'return members.mean(0) - (doubt * members.std(0) if how == "uncertainty" else 0.0)',
            'return members.mean(0) - (doubt * members.var(0) if how == "uncertainty" else 0.0)',
        ),
        (
            "if not loading.same_tokens(own, read_own(key, other, model, context.conversational)):",
            "if False:",
        ),
    ),
    *_rows(
        "scorers/test_ensembles",
        "core/batch.py",
        ("return None if several is None else torch.stack([*several.values()]).std(0)", "return None"),
    ),
    *_rows(
        "scorers/test_ensembles",
        "models/loading.py",
        ("mean[name] += (state[name] - mean[name]) / number", "mean[name] += (state[name] - mean[name]) / 2"),
        ("if one != other:", "if False:"),
    ),
    *_rows(
        "stages/test_prerequisites",
        "stages/prerequisites.py",
        ("seed = cfg.stages.seed + _APART * len(made)", "seed = cfg.stages.seed"),
        ('depends["label_noise"] = cfg.stages.label_noise', "pass"),
        ("if draws.random() < share:", "if random.random() < share:"),
    ),
    *_rows(
        "core/test_best_of",
        "core/overoptimization.py",
        ("shares = np.add.reduceat(weights, ends - counts) / counts", "shares = weights[ends - 1]"),
        (
            "weights = n / total * np.cumprod([1.0, *((places - n + 1).clip(0) / places)])[::-1]",
            "weights = n / total * np.cumprod([1.0, *((places - n).clip(0) / places)])[::-1]",
        ),
        ("return math.log(n) - (n - 1) / n", "return math.log(n)"),
    ),
    *_rows(
        "training/test_evaluators",
        "training/evaluators.py",
        ("if state.update == 0 and self.best_of is not None:", "if self.best_of is not None:"),
        ("if ranks.from_first(file.exists):", "if False:"),
        (
            "sampling = replace(asked, samples=most, request=request)",
            "sampling = replace(asked, samples=most)",
        ),
        (
            'asked = replace(self.sampling, temperature=self.train_temperature, purpose="eval-best-of")',
            'asked = replace(self.sampling, purpose="eval-best-of")',
        ),
    ),
    *_rows(
        "memory/test_plan",
        "memory/sizes.py",
        (
            'for key, name in named[:1] if value_at(scorer, "combine") is Combine.weights else named:',
            "for key, name in named:",
        ),
    ),
    # -- stages --------------------------------------------------------------------------------------
    *_rows(
        "stages/test_probes",
        "stages/probes.py",
        (
            'high = scores > right + margin if kind == "added" else scores >= right - margin',
            "high = scores > right + margin",
        ),
        ("high |= apart & (scores - wrong > _GAP * (right - wrong))", ""),
        ("return scores >= np.median(right) - margin", "return scores > right.max()"),
        ('return high & (verifies or kind != "near")', 'return high & (kind != "near")'),
        ("forth, back = y.mean(0 if compares else 1)", "forth, back = y.mean(1)"),
        ("judge.known.clear()  # it is asked again", ""),
        (
            "return np.array([[signs[each] for each in asked], [-signs[each] for each in turned]])",
            "return np.array([[signs[each] for each in asked], [signs[each] for each in turned]])",
        ),
        (
            '"position bias": bounded_interval((y[:, 0] - y[:, 1]).mean(0) / 2, -1, 1),',
            '"position bias": bounded_interval((y[:, 0] - y[:, 1]).flatten() / 2, -1, 1),',
        ),
    ),
    *_rows(
        "stages/test_probes",
        "core/statistics.py",
        (
            "centre, *ends = mean_interval([*values, *(least, most) * 2])[:3]",
            "centre, *ends = mean_interval([*values])[:3]",
        ),
    ),
]
