"""Predicted against measured step time over an emulated link: the step-time model with rates measured between the
steps.

Rates of the case's width, with the link, and pairs of steps take turns, and the second step of a pair counts; the
prediction for it is the mean of those before and after it. So a machine shared with others slows both sides alike.
Medians count on both, unlike in a plan, which is for a machine that does nothing else. One thread computes and one
updates. The cases are chosen so that each kind of queue limits one of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from bench.models import random_rows, random_store
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.rate_probe import Sizes, measure_rates
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.step_time import predict_step
from horizon_server.planning.step_work import work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.records.plan import StepPrediction

_HEAD_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape and one size of step."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int = 4096
    tied: bool = True
    rows: int
    row_tokens: int
    link_gbps: float
    clips: bool = True

    @property
    def config(self) -> PretrainedConfig:
        """A Qwen3 config."""
        num_heads = self.hidden // _HEAD_SIZE
        config: PretrainedConfig = AutoConfig.for_model(
            "qwen3",
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            head_dim=_HEAD_SIZE,
            vocab_size=self.vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
        )
        return config

    @property
    def sizes(self) -> Sizes:
        """What is measured for it: as for a plan, but small enough to be repeated often."""
        return Sizes(
            widths=(self.hidden,),
            attention_width=self.hidden,
            row_tokens=self.row_tokens,
            gemm_tokens=(self.row_tokens,),
            document_tokens=(self.row_tokens,),
            product=512,
            chunk_tokens=256,
            vocabulary=2048,
        )


CASES: Mapping[str, Case] = {
    "wide steps": Case(hidden=512, inner=1536, layers=4, rows=2, row_tokens=256, link_gbps=0.5),
    "long rows": Case(hidden=256, inner=768, layers=4, tied=False, rows=1, row_tokens=1024, link_gbps=0.25),
    "slow link": Case(hidden=384, inner=1024, layers=16, rows=1, row_tokens=64, link_gbps=0.04),
    "no clipping": Case(hidden=768, inner=2048, layers=4, rows=4, row_tokens=64, link_gbps=0.06, clips=False),
    "few tokens": Case(hidden=1024, inner=3072, layers=4, rows=1, row_tokens=16, link_gbps=1.0),
    # As quick as the memory that the emulated link copies through, which compute wants too.
    "few tokens, quick link": Case(hidden=1024, inner=3072, layers=4, rows=1, row_tokens=16, link_gbps=4.0),
}


def folder_of(case: Case, template: Template) -> ModelFolder:
    """The model as a plan sees it."""
    config = case.config.to_dict()
    return ModelFolder(
        path=Path(), config=config, shape=ModelShape.from_config(config), headers={}, layout=template.layout
    )


def predicted(case: Case, template: Template, rates: DeviceRates) -> StepPrediction:
    """What the model says: a device of its own at the other end of a link, which computes in fp32."""
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=case.rows * case.row_tokens, sequence_length=case.row_tokens)
    work = work_of_step(folder_of(case, template), recipe, Execution(grad_bytes=4 if case.clips else 0))
    return predict_step(work, rates, shares_processors=False)


class Run:
    """A training run of a case that keeps going, so that an update is hidden where the engine hides it."""

    def __init__(self, case: Case, template: Template) -> None:
        self._case = case
        self._device = HostDevice(num_threads=1, link_bytes_per_s=case.link_gbps * 1e9)
        self._store = random_store(template, grad_dtype=self._device.gradient_dtype if case.clips else None)
        recipe = Recipe(learning_rate=1e-5, max_grad_norm=1.0 if case.clips else None)
        execution = Execution(optimizer_threads=1)
        self._trainer = Trainer(template, self._store, self._device, recipe, execution, num_steps=1000)
        self.step_s()

    def step_s(self) -> float:
        """Seconds of the second of two steps: the first one's update ran while nothing else did."""
        seconds = []
        for seed in range(2):
            case = self._case
            rows = random_rows(case.vocabulary, num_rows=case.rows, row_tokens=case.row_tokens, seed=seed)
            start_s = time.perf_counter()
            self._trainer.train_step(rows)
            seconds.append(time.perf_counter() - start_s)
        self._trainer.flush()
        return seconds[1]

    def close(self) -> None:
        """Free what it holds."""
        self._trainer.close()
        self._device.close()
        self._store.close()


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", action="store_true", help="also print the seconds of each part in each round")
    arguments = parser.parse_args()
    print(
        "| case | hidden x layers | rows x tokens | clipping | link GB/s | limited by | predicted s | measured s "
        "| predicted / measured: median | of each round |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.case:
        case = CASES[name]
        template = Template.from_config(case.config)
        make = partial(HostDevice, num_threads=1, link_bytes_per_s=case.link_gbps * 1e9)
        measure = partial(
            measure_rates, "host", num_threads=1, budget_s=0.0, sizes=case.sizes, make=make, choose=statistics.median
        )
        said, took = [predicted(case, template, measure())], []
        with closing(Run(case, template)) as run:
            for _ in range(arguments.rounds):
                took.append(run.step_s())
                said.append(predicted(case, template, measure()))
                if arguments.parts:
                    parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in said[-1].parts_s.items())
                    print(f"  {name}: {took[-1]:.3f} s, then {said[-1].step_s:.3f}: {parts}", flush=True)
        expected = [(before.step_s + after.step_s) / 2 for before, after in pairwise(said)]
        ratios = [expected_s / took_s for expected_s, took_s in zip(expected, took, strict=True)]
        bounds = [one.bound for one in said]
        print(
            f"| {name} | {case.hidden} x {case.layers} | {case.rows} x {case.row_tokens} | "
            f"{'on' if case.clips else 'off'} | {case.link_gbps:g} | {max(set(bounds), key=bounds.count)} "
            f"| {statistics.median(expected):.3f} "
            f"| {statistics.median(took):.3f} | {statistics.median(ratios):.2f} "
            f"| {' '.join(f'{ratio:.2f}' for ratio in ratios)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
