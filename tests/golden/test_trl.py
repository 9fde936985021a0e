"""Steps of every method against TRL's own trainers: the same pairs and labels, one batch, some steps in fp32.

TRL 1.16 has DPO (with IPO) and KTO in `trl`, ORPO and CPO (with SimPO) in `trl.experimental`. Its data preparation is
replaced, so that both sides read the same tokens; all else, the reference model, loss, optimizer and loop, is TRL's.
Policy gradients are not here: GRPO's trainer samples by itself. They are held to the formula in test_objectives.py.
"""

from __future__ import annotations

import array
import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_gradients, check_numbers, check_weights, plain_and_exact, values_of
from tests.support.tiny_models import VOCAB
from torch import Tensor

from horizon_formats.formats import DataKind
from horizon_server.engine.data import StepPlan
from horizon_server.engine.references import References
from horizon_server.figures import StepFigures
from horizon_server.spec import parse_job_spec
from horizon_server.store.host_store import merge_master
from horizon_server.store.prepared import DocumentColumns, PreparedFolder
from horizon_server.worker.objective import MethodData

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

pytest.importorskip("trl")

NUM_STEPS = 5
ANSWERS = ((7, 11), (3, 9), (6, 4), (12, 8), (5, 5), (2, 10))
"""Lengths of the answers of each row: chosen and rejected; of KTO, the first alone."""


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True, kw_only=True)
class Case:
    method: str
    trainer: str
    """The names of TRL's trainer without its ending, and of its module."""
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    """The same options as TRL names them."""
    num_prompt: int = 5


CASES = {
    "dpo": Case(method="dpo", trainer="DPO", options={"beta": 0.3}, given={"beta": 0.3}),
    "hinge": Case(
        method="dpo", trainer="DPO", options={"beta": 0.3, "loss": "hinge"}, given={"beta": 0.3, "loss_type": ["hinge"]}
    ),
    "dpo of averages": Case(
        method="dpo",
        trainer="DPO",
        options={"beta": 2.0, "length_normalised": True},
        given={"beta": 2.0, "loss_type": ["sigmoid_norm"]},
    ),
    "ipo": Case(method="ipo", trainer="DPO", options={"beta": 0.3}, given={"beta": 0.3, "loss_type": ["ipo"]}),
    "simpo": Case(
        method="simpo",
        trainer="CPO",
        given={"beta": 2.0, "simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    # A small beta, so that the steps end before the best margin: there the gradient vanishes, and Adam divides rounding
    # by itself.
    "simpo with smoothing": Case(
        method="simpo",
        trainer="CPO",
        options={"beta": 1.0, "gamma": 0.6, "label_smoothing": 0.1},
        given={"beta": 1.0, "simpo_gamma": 0.6, "label_smoothing": 0.1, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    # TRL's takes the loss of the prompt's tokens too: of a prompt of one token there are none.
    "orpo": Case(method="orpo", trainer="ORPO", options={"penalty": 0.25}, given={"beta": 0.25}, num_prompt=1),
    "kto": Case(
        method="kto",
        trainer="KTO",
        options={"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75},
        given={"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75},
    ),
}


def rows_of(case: Case) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        # From 8: special tokens are below.
        return torch.randint(8, VOCAB, (length,), generator=generator).tolist()

    return [Row(draw(case.num_prompt), draw(chosen), draw(rejected)) for chosen, rejected in ANSWERS]


def other_answer(rows: list[Row], number: int) -> list[int]:
    """The answer of another row, which estimates KTO's divergence."""
    return rows[number - 1].chosen


def write_data(folder: Path, case: Case, rows: list[Row]) -> None:
    """What the preparation makes of the rows."""
    kind, columns = DataKind.KTO if case.method == "kto" else DataKind.PREFERENCE, DocumentColumns()
    for number, row in enumerate(rows):
        labels, second = (None, None), row.rejected
        if kind is DataKind.KTO:
            labels, second = (number % 2, -1), other_answer(rows, number)  # type: ignore[assignment]
        for answer, label in zip((row.chosen, second), labels, strict=True):
            trained = b"\0" * len(row.prompt) + b"\1" * len(answer)
            columns.add(array.array("i", row.prompt + answer), trained, len(answer), label=label)
    with PreparedFolder(folder, with_evaluation=False, kind=kind) as target:
        target.train.add(columns)
        target.publish({"kind": kind})


@dataclass
class Plain:
    """What TRL's trainer did: loss and figures of every step, the first step's gradients, the last one's weights."""

    model: Any
    losses: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def trained_by_trl(case: Case, rows: list[Row], model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Plain:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    plain = Plain(model)
    if case.trainer in ("ORPO", "CPO"):
        module = __import__(f"trl.experimental.{case.trainer.lower()}", fromlist=["_"])
    else:
        module = __import__("trl")
    kind, config = getattr(module, f"{case.trainer}Trainer"), getattr(module, f"{case.trainer}Config")
    texts: list[dict[str, Any]]
    words = {str(number): number for number in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="7", eos_token="2", bos_token="1"
    )
    if case.trainer in ("ORPO", "CPO"):
        texts = [{key: " ".join(map(str, value)) for key, value in vars(row).items()} for row in rows]
        monkeypatch.setattr(kind, "tokenize_row", lambda self, row, model=None: columns_of(row))
    elif case.trainer == "DPO":
        texts = [{"prompt_ids": row.prompt, "chosen_ids": row.chosen, "rejected_ids": row.rejected} for row in rows]
    else:
        texts = [
            {
                "prompt_ids": row.prompt,
                "completion_ids": row.chosen,
                "KL_completion_ids": other_answer(rows, i),
                "label": i % 2 == 1,
            }
            for i, row in enumerate(rows)
        ]
    if case.trainer in ("DPO", "KTO"):
        monkeypatch.setattr(kind, "_prepare_dataset", lambda self, dataset, *_: dataset)

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not plain.gradients:
                for name, parameter in kwargs["model"].named_parameters():
                    plain.gradients[name] = parameter.grad.clone()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "rewards/margins" in kwargs["logs"]:
                plain.figures.append(dict(kwargs["logs"]))

    trainer = kind(
        model=model,
        args=config(
            output_dir=str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=len(rows),
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            warmup_steps=0,
            max_grad_norm=1e9,
            weight_decay=0.0,
            optim="adamw_torch",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_length=None,
            **case.given,
        ),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[Recorder()],
        # By default it is loaded again from where the model came from.
        **({"ref_model": copy.deepcopy(model)} if case.trainer in ("DPO", "KTO") else {}),
    )
    compute_loss = trainer.compute_loss

    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        plain.losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(trainer, "compute_loss", recorded)
    trainer.train()
    return plain


def columns_of(row: dict[str, str]) -> dict[str, list[int]]:
    """A row as ORPO's and CPO's trainers tokenise one, without the special tokens that they add."""
    prompt = [int(word) for word in row["prompt"].split()]
    columns: dict[str, list[int]] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for name in ("chosen", "rejected"):
        answer = [int(word) for word in row[name].split()]
        columns[f"{name}_input_ids"] = prompt + answer
        columns[f"{name}_attention_mask"] = [1] * len(prompt + answer)
        columns[f"{name}_labels"] = [-100] * len(prompt) + answer
    return columns


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_trl(
    name: str,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, model = CASES[name], engine.tiny_model("qwen3")
    rows = rows_of(case)
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "method": case.method, case.method: case.options})
    write_data(tmp_path / "prepared", case, rows)
    data = MethodData(tmp_path / "prepared", spec)
    # All rows are one step, packed; the order of documents is another one in every epoch.
    plan = StepPlan(data.dataset, sequence_length=64, tokens_per_step=1024, max_steps=NUM_STEPS, group_size=2, seed=3)
    # The trainer's steps are the plan's, as in a job: then the references are computed in the same joined rows, and
    # have the same bits.
    run = engine.start(model, lr_schedule="constant", max_grad_norm=1e9, head_chunk_tokens=16, tokens_per_step=1024)
    if spec.needs_references:
        data.references = References.computed(tmp_path / "prepared", plan, run.trainer, key="start")
    own: list[StepFigures] = []
    gradients: dict[str, Tensor] = {}
    for i in range(NUM_STEPS):
        own.append(run.trainer.train_step(*data.step(plan, i)))
        if not gradients:
            gradients = {name: run.gradient(name).clone() for name, _ in model.reference().named_parameters()}
    run.trainer.flush()

    plain, exact = plain_and_exact(
        model.reference, lambda reference: trained_by_trl(case, rows, reference, tmp_path / "trl", monkeypatch)
    )

    check_numbers([figures.loss for figures in own], plain.losses, exact.losses, "the losses")
    assert exact.losses[-1] < 0.9 * exact.losses[0], "the test is about steps that train"
    check_gradients(gradients, plain.gradients, exact.gradients)
    weights = {name: weight_of(run, name).view_as(value) for name, value in exact.model.named_parameters()}
    check_weights(weights, values_of(plain.model), values_of(exact.model))
    assert len(exact.figures) == NUM_STEPS
    for figure in own[0].method_figures:
        mine, theirs, wanted = (
            [values[figure] for values in each]
            for each in ([step.method_figures for step in own], plain.figures, exact.figures)
        )
        if figure == "rewards/accuracies":
            # Before the first update no answer is better than another, not even by a rounding.
            assert mine == pytest.approx(wanted), figure
        else:
            check_numbers(mine, theirs, wanted, figure)


def weight_of(run: Run, name: str) -> Tensor:
    hi, lo = (run.store.tensor(name, plane).reshape(-1) for plane in ("hi", "lo"))
    weight = torch.empty(hi.numel())
    merge_master(hi, lo, weight)
    return weight
