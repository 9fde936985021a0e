"""Twenty steps by Tinker's SDK against the same loop by torch and PEFT alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState
from tests.support.tinker_sdk import close_connections, service_client
from tinker import ServiceClient, TrainingClient, types
from transformers import AutoModelForCausalLM

# The SDK may leave connections open at any moment.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
STEPS = 20
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(autouse=True)
def _closed_after_each_test() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def service(daemon: DaemonProcess) -> Iterator[ServiceClient]:
    url = f"http://{daemon.endpoints['http']}"
    with service_client(url, f"tml-{daemon.user('ada')}") as client:
        yield client


def texts_of(step: int) -> list[list[int]]:
    """The texts of a step, drawn by its number."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, 200, (length,), generator=generator).tolist() for length in (8, 13, 10, 6)]


def weights_of(tokens: list[int]) -> list[float]:
    """The first target of a text is not learned."""
    return [0.0] + [1.0] * (len(tokens) - 2)


def losses_by_the_sdk(client: TrainingClient, learning_rate: float) -> list[float]:
    """All calls are sent before the first is awaited."""
    futures = []
    for step in range(STEPS):
        batch = []
        for tokens in texts_of(step):
            inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights_of(tokens)}
            batch.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        futures.append(client.forward_backward(batch, "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=learning_rate, **ADAM))
    return [future.result(240).metrics["loss:sum"] for future in futures]


def losses_by_torch(model: Any, learning_rate: float) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (ADAM["beta1"], ADAM["beta2"])
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=betas, eps=ADAM["eps"], weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for tokens in texts_of(step):
            ids = torch.tensor([tokens])
            logprobs = torch.log_softmax(model(ids[:, :-1]).logits[0].float(), -1)
            picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            loss = -(picked * torch.tensor(weights_of(tokens))).sum()
            torch.autograd.backward(loss)
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_twenty_steps_of_all_parameters_are_those_of_torch(service: ServiceClient, pushed: PushedState) -> None:
    client = service.create_lora_training_client(MODEL, rank=0).result(240)
    found = losses_by_the_sdk(client, 1e-4)
    model: Any = AutoModelForCausalLM.from_pretrained(pushed.model, dtype=torch.float32)
    wanted = losses_by_torch(model, 1e-4)
    print("largest relative distance", max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_twenty_steps_of_adapters_are_those_of_peft(
    service: ServiceClient, pushed: PushedState, daemon: DaemonProcess
) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=3).result(240)
    client.save_state("drawn").result(240)
    (drawn,) = daemon.state_dir.glob("jobs/*/checkpoints/step-*")
    found = losses_by_the_sdk(client, 1e-3)

    def adapted() -> Any:
        base: Any = AutoModelForCausalLM.from_pretrained(pushed.model, dtype=torch.float32)
        return PeftModel.from_pretrained(base, str(drawn), is_trainable=True)

    wanted, untrained = losses_by_torch(adapted(), 1e-3), losses_by_torch(adapted(), 0.0)
    print("largest relative distance", max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)))
    assert wanted[-1] != pytest.approx(untrained[-1], rel=1e-4), "the adapter changes what comes out"
    assert found == pytest.approx(wanted, rel=1e-6)
