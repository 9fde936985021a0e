"""Whose turn it is to ask the child that answers prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from horizon_server.services.sampling_turns import MAX_CALLS, MAX_CALLS_OF_USER, SamplingTurns


class Callers:
    """Callers by name, each of whom stays in the turn until it is let go."""

    def __init__(self, turns: SamplingTurns) -> None:
        self._turns = turns
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.order: list[str] = []
        self.running: set[str] = set()

    async def come(self, name: str, model: str, *, user: str = "") -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._call(name, model, user or name))
        await settled()

    async def _call(self, name: str, model: str, user: str) -> None:
        async with self._turns.of_user(user), self._turns.of_model(model):
            self.order.append(name)
            self.running.add(name)
            try:
                await self._leave[name].wait()
            finally:
                self.running.remove(name)

    async def go(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
        await settled()

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def callers() -> AsyncIterator[Callers]:
    made = Callers(SamplingTurns())
    yield made
    await made.close()


async def test_calls_for_the_model_that_has_its_turn_join(callers: Callers) -> None:
    for name in ("a1", "a2", "a3"):
        await callers.come(name, "A")
    assert callers.running == {"a1", "a2", "a3"}


async def test_a_call_for_another_model_waits_for_all_and_those_after_it_behind_it(callers: Callers) -> None:
    for name, model in (("a1", "A"), ("a2", "A"), ("b1", "B"), ("a3", "A"), ("c1", "C"), ("b2", "B")):
        await callers.come(name, model)
    assert callers.running == {"a1", "a2"}
    await callers.go("a1")
    assert callers.running == {"a2"}
    await callers.go("a2")
    # With those that want it too, so that it is loaded once for them.
    assert callers.running == {"b1", "b2"}
    # Who comes now is behind those that wait.
    await callers.come("b3", "B")
    await callers.go("b1", "b2")
    assert callers.running == {"a3"}
    await callers.go("a3")
    assert callers.running == {"c1"}
    await callers.go("c1")
    assert callers.running == {"b3"}


async def test_ever_new_callers_of_one_model_do_not_keep_another_one_out(callers: Callers) -> None:
    await callers.come("a0", "A")
    await callers.come("other", "B")
    for number in range(1, 20):
        await callers.come(f"a{number}", "A")
    await callers.go("a0")
    assert callers.running == {"other"}


async def test_who_gives_up_is_waited_for_by_none(callers: Callers) -> None:
    for name, model in (("a1", "A"), ("b1", "B"), ("a2", "A")):
        await callers.come(name, model)
    await callers.give_up("b1")
    assert callers.running == {"a1", "a2"}
    await callers.come("b2", "B")
    await callers.give_up("a1")
    await callers.give_up("a2")
    assert callers.running == {"b2"}


async def test_a_caller_who_gives_up_in_the_moment_of_its_turn_leaves_it_to_the_next(callers: Callers) -> None:
    for name, model in (("a1", "A"), ("b1", "B"), ("c1", "C")):
        await callers.come(name, model)
    callers._leave["a1"].set()
    # Until the turn is b1's, which has not noticed yet.
    for _ in range(10):
        if callers._turns._model == "B":
            break
        await asyncio.sleep(0)
    assert callers._turns._model == "B" and "b1" not in callers.order
    await callers.give_up("b1")
    assert callers.running == {"c1"}


async def test_one_user_has_so_many_calls_and_others_come_in_beside_them(callers: Callers) -> None:
    for number in range(MAX_CALLS_OF_USER + 5):
        await callers.come(f"a{number}", "A", user="ada")
    assert len(callers.running) == MAX_CALLS_OF_USER
    await callers.come("bob", "A")
    assert "bob" in callers.running
    # What waits for the own turn waits for no model, so it is not before the others.
    await callers.come("carl", "B")
    await callers.go(*(f"a{number}" for number in range(MAX_CALLS_OF_USER)), "bob")
    assert callers.running == {"carl"}


async def test_all_together_have_so_many_calls(callers: Callers) -> None:
    for number in range(MAX_CALLS + 3):
        await callers.come(f"u{number}", "A")
    assert len(callers.running) == MAX_CALLS
    await callers.go("u0", "u1")
    assert len(callers.running) == MAX_CALLS
    assert {f"u{MAX_CALLS}", f"u{MAX_CALLS + 1}"} <= callers.running


async def test_after_a_long_turn_the_queue_may_look_at_the_memory_before_the_next_one() -> None:
    callers = Callers(SamplingTurns(most_turn_s=0.0, pause_s=1.0))
    await callers.come("a1", "A")
    await callers.come("a2", "A")
    assert callers.running == {"a1"}
    await callers.go("a1")
    assert not callers.running
    async with asyncio.timeout(240):
        while not callers.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert callers.running == {"a2"}
    await callers.close()
