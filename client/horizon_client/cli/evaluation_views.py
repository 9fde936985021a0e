"""Evaluations as people read them: as they come, and before and after in a job's details."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from horizon_client.cli.harness import samples_text
from horizon_client.cli.output import clean
from horizon_client.cli.root import Interrupted
from horizon_client.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from horizon_client.resources import (
        CheckpointEvaluation,
        EvalAnswer,
        EvalEvent,
        EvalSetFigures,
        EvaluationProgress,
        Job,
        TaskResult,
    )

# Those of a step that fit into a line; the rest is in `horizon job get` and in the events
_METHOD_FIGURES = ("rewards/accuracies", "rewards/margins", "kl", "clip_ratio/region_mean")
_SHOWN_ANSWERS = 3
_SHOWN_CHARACTERS = 160
_SHOWN_TASKS = 20
_MAIN_SET = "eval"
_PROGRESS_EVERY_S = 5.0


def evaluation_text(event: EvalEvent) -> str:
    """Return an evaluation as a line, with one more for each named set and for the first answers."""
    took = f"  in {event.duration_s:.1f} s" if event.duration_s else ""
    first = event.sets[0] if event.sets else None
    accuracy = f"  accuracy {first.accuracy:.1%}" if first is not None and first.accuracy is not None else ""
    figures = method_figures_text(event.method_figures)
    lines = [
        f"step {event.step}  eval_loss {event.eval_loss:.4f}{accuracy}{figures}  on {event.num_targets:,} tokens{took}"
    ]
    if len(event.sets) > 1 or (first is not None and (first.name != _MAIN_SET or first.num_answers)):
        lines += [f"  {clean(of_set.name)}: {_figures_text(of_set)}" for of_set in event.sets]
    for answer in event.answers[:_SHOWN_ANSWERS]:
        lines += _answer_lines(answer)
    return "\n".join(lines)


def checkpoint_evaluation_text(found: CheckpointEvaluation) -> str:
    """Return the figures of a checkpoint: a line for each set, its first answers, and what was computed otherwise than
    in the job."""
    event = found.figures
    if event is None:
        return "the node has sent no figures"
    lines = [f"{clean(of_set.name)}: {_figures_text(of_set)}" for of_set in event.sets]
    for answer in event.answers[:_SHOWN_ANSWERS]:
        lines += _answer_lines(answer)
    lines += [f"note: {clean(text)}; the last digits may differ from the job's own" for text in found.differences]
    return "\n".join([f"step {event.step}", *lines])


class EvaluationReporter(Reporter):
    """A context in which a command prints how far an evaluation is; Ctrl-C ends it."""

    def __init__(self) -> None:
        self._shown: tuple[str, str] | None = None
        self._shown_at = 0.0

    def __enter__(self) -> EvaluationReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("interrupted; the node has ended the evaluation") from None

    def evaluation(self, progress: EvaluationProgress) -> None:
        """Print a line for each set, and one now and then while it takes long."""
        now, what = time.monotonic(), (progress.phase, progress.set)
        if what == self._shown and now - self._shown_at < _PROGRESS_EVERY_S:
            return
        self._shown, self._shown_at = what, now
        verb, unit = ("preparing", "rows") if progress.phase == "prepare" else ("evaluating", "steps")
        click.echo(f"{verb} {clean(progress.set)}: {progress.done:,} of {progress.total:,} {unit}", err=True)


def method_figures_text(figures: Mapping[str, float]) -> str:
    """Return what a method reports besides the loss, with space before each; empty for cross-entropy."""
    return "".join(f"  {name} {figures[name]:.4g}" for name in _METHOD_FIGURES if name in figures)


def evaluation_facts(job: Job) -> list[tuple[str, str]]:
    """Return the figures of each set before training and now, which evaluation is the best, and the results of
    evaluation programs."""
    return [*_eval_facts(job), *_task_facts(job)]


def _task_facts(job: Job) -> list[tuple[str, str]]:
    """Return what evaluation programs have measured, the newest of each task and metric."""
    newest = {(one.task, one.metric): one for one in job.task_results}
    facts = [(f"task {clean(one.task)}", _task_text(one)) for one in newest.values()]
    more = [("tasks", f"{len(facts)} figures in all: -o json")] if len(facts) > _SHOWN_TASKS else []
    return [*facts[-_SHOWN_TASKS:], *more]


def _task_text(one: TaskResult) -> str:
    error = "" if one.stderr is None else f" +- {one.stderr:.4f}"
    where = f"step {one.step}, {samples_text(one)} documents, {clean(one.program)}"
    return f"{clean(one.metric)} {one.value:.4f}{error} ({where})"


def _eval_facts(job: Job) -> list[tuple[str, str]]:
    first, best, last = job.first_eval, job.best_eval, job.last_eval
    if first is None or last is None:
        return []
    before = {figures.name: figures for figures in first.sets}
    facts = []
    for now in last.sets:
        then = before.get(now.name)
        is_one = then is None or first.step == last.step
        text = _figures_text(now) if is_one or then is None else _change_text(then, now)
        steps = f" (step {last.step})" if is_one else f" (step {first.step} -> {last.step})"
        facts.append((f"eval {clean(now.name)}" if now.name != _MAIN_SET else _MAIN_SET, text + steps))
    if best is not None and best.judged is not None:
        by = clean(str(job.spec.get("eval", {}).get("best_by", "loss")))
        facts.append(("best", f"step {best.step} by {by}: {best.judged:.4f}"))
    return facts


def _figures_text(figures: EvalSetFigures) -> str:
    parts = [f"loss {figures.loss:.4f}"]
    if figures.perplexity is not None:
        parts.append(f"perplexity {figures.perplexity:.4g}")
    if figures.accuracy is not None:
        parts.append(f"accuracy {figures.accuracy:.2%} ({figures.num_correct:,} of {figures.num_targets:,} tokens)")
    if figures.exact_match is not None:
        parts.append(f"exact match {_match_text(figures)}")
    return ", ".join(parts)


def _change_text(before: EvalSetFigures, now: EvalSetFigures) -> str:
    parts = [f"loss {before.loss:.4f} -> {now.loss:.4f}"]
    if before.perplexity is not None and now.perplexity is not None:
        parts.append(f"perplexity {before.perplexity:.4g} -> {now.perplexity:.4g}")
    if before.accuracy is not None and now.accuracy is not None:
        parts.append(f"accuracy {before.accuracy:.2%} -> {now.accuracy:.2%}")
    if before.exact_match is not None and now.exact_match is not None:
        parts.append(f"exact match {_match_text(before)} -> {_match_text(now)}")
    return ", ".join(parts)


def _match_text(figures: EvalSetFigures) -> str:
    return f"{figures.exact_match or 0:.2%} ({figures.num_matches} of {figures.num_answers})"


def _answer_lines(answer: EvalAnswer) -> Iterator[str]:
    yield f"  prompt: ...{_line(answer.prompt[-_SHOWN_CHARACTERS:])}"
    cut = "" if answer.ended == "stop" else " (cut)"
    mark = ""
    if answer.expected is not None:
        found = "no final answer" if answer.found is None else f"final answer {_line(answer.found)}"
        mark = f"  [{'right' if answer.matches else 'wrong'}: {found}, data {_line(answer.expected)}]"
    yield f"  answer: {_line(answer.answer)}{cut}{mark}"


def _line(text: str) -> str:
    """Return a text on one line, short, without control characters."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."
