"""What an attempt knows of its result, for the texts next to a checkpoint's weights."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from horizon_server.engine.data import PreparedDataset
from horizon_server.events import EvalAnswer, EvalDone
from horizon_server.figures import StepFigures
from horizon_server.spec import EVAL_SET
from horizon_server.store.model_card import DataFacts, ResultFacts, base_facts
from horizon_server.store.prepared import EVALUATION_FOLDER
from horizon_server.version import VERSION
from horizon_server.worker_link.request import WorkerRequest

_FIGURES_OF_A_SET = (
    *("name", "loss", "perplexity", "accuracy", "exact_match"),
    *("num_targets", "num_correct", "num_answers", "num_matches"),
)


class ResultRecorder:
    """Keeps the newest figures of an attempt. Thread: the worker's main thread."""

    def __init__(
        self, request: WorkerRequest, data: PreparedDataset | None, evaluated: dict[str, PreparedDataset]
    ) -> None:
        """A session has no `data`."""
        prepared = request.prepared
        self._request, self._base = request, base_facts(request.model, request.spec.model)
        spec = request.spec
        named = {EVAL_SET: spec.eval_dataset or spec.dataset, **spec.eval.sets}
        self._data = [
            *([] if data is None or prepared is None else [_data_facts(spec.dataset, "training", prepared, data)]),
            *(
                _data_facts(named[name], f"evaluation ({name})", request.evaluations[name], dataset)
                for name, dataset in evaluated.items()
            ),
        ]
        self._step: StepFigures | None = None
        self._evaluation: EvalDone | None = None
        self._answers: Sequence[EvalAnswer] = ()

    def stepped(self, figures: StepFigures) -> None:
        """Keep the figures of a step."""
        self._step = figures

    def evaluated(self, done: EvalDone, answers: Sequence[EvalAnswer]) -> None:
        """Keep an evaluation, with all its answers, none of them cut."""
        self._evaluation, self._answers = done, answers

    def facts(self, step: int, *, num_steps: int, num_tokens: int) -> ResultFacts:
        """Return what is known of a step, `num_tokens` tokens of training into the job. An evaluation by an earlier
        attempt is not."""
        request, evaluation = self._request, self._evaluation
        is_of_step = evaluation is not None and evaluation.step == step
        return ResultFacts(
            job_id=request.job_id,
            job_name=request.spec.name,
            step=step,
            num_steps=num_steps,
            num_parameters=request.plan.num_parameters,
            num_trained_parameters=request.plan.num_trained_parameters,
            # Plain text for YAML: a spec from the wire has floats and lists only.
            spec=request.spec.model_dump(mode="json", exclude_defaults=True),
            method=request.spec.method,
            base=self._base,
            data=self._data,
            train_loss=_finite(self._step.loss) if self._step is not None and self._step.step == step else None,
            num_trained_tokens=num_tokens,
            evaluation=_plain_evaluation(evaluation) if evaluation is not None and is_of_step else None,
            answers=[dataclasses.asdict(answer) for answer in self._answers] if is_of_step else (),
            versions={
                "horizon": VERSION,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        )


def _data_facts(name: str, use: str, prepared: Path, dataset: PreparedDataset) -> DataFacts:
    # The rows that are held out are in a folder of the others.
    key = prepared.parent if prepared.name == EVALUATION_FOLDER else prepared
    is_held_out, report = key != prepared, dataset.report
    return DataFacts(
        name=name,
        use=use,
        digest=key.parent.name,
        rows=int(report.get("eval_rows" if is_held_out else "rows", 0)),
        documents=dataset.num_documents,
        tokens=dataset.num_tokens,
        trained_tokens=int(report.get("eval_trained_tokens" if is_held_out else "trained_tokens", 0)),
    )


def _plain_evaluation(done: EvalDone) -> dict[str, Any]:
    """The figures of each set; JSON has no infinity, so that such a figure is null."""
    sets = [{name: _finite(getattr(figures, name)) for name in _FIGURES_OF_A_SET} for figures in done.sets]
    return {"step": done.step, "eval_loss": _finite(done.eval_loss), "judged": _finite(done.judged), "sets": sets}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
