"""Who may call what by gRPC: every method, for every kind of caller. A method without a case fails."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from tests.access_scene import ACCEPTED, CALLERS, Scene
from tests.component.api.access_cases import CASES, expected

from horizon_server.api.effects import EFFECTS
from horizon_server.api.grpc.calls import CALLS, SERVICES
from horizon_server.api.grpc.server import start_grpc_server


def test_tokens_that_allow_no_changes_are_refused_where_a_call_is_declared_to_change_something() -> None:
    assert CALLS.keys() == CASES.keys(), "every method is declared as reading or changing"
    read, admin_read = ACCEPTED.index("read"), ACCEPTED.index("admin_read")
    for name, cases in CASES.items():
        for case in cases:
            outcomes = {case.outcomes[read], case.outcomes[admin_read]}
            assert (outcomes == {"PERMISSION_DENIED"}) == (EFFECTS[name].need == "change"), name


async def test_every_method_answers_every_caller_as_it_should(scene: Scene) -> None:
    methods = {f"{service.name}/{method.name}": (service, method) for service in SERVICES for method in service.methods}
    assert methods.keys() == CASES.keys(), "every method needs a case"
    server = await start_grpc_server(scene.services, address="127.0.0.1:0", tls=None)
    wrong = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for name, cases in CASES.items():
            service, method = methods[name]
            for number, case in enumerate(cases):
                for caller in CALLERS:
                    code = await _call(channel, service, method, await case.make(scene), scene.tokens[caller])
                    should = expected(case.outcomes, caller)
                    should = case.instead if should == "OK" else should
                    if code != should:
                        wrong.append(f"{name}[{number}] {caller}: {code}, not {should}")
    await server.stop(0)
    assert not wrong, "\n".join(wrong)


async def _call(channel: grpc.aio.Channel, service: Any, method: Any, request: Any, token: str) -> str:
    kinds: dict[str, Any] = {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    path = f"/{service.full_name}/{method.name}"
    options: dict[str, Any] = {"metadata": [("authorization", f"Bearer {token}")] if token else [], "timeout": 60}
    try:
        if method.client_streaming:
            await channel.stream_unary(path, **kinds)(iter([request]), **options)
        elif method.server_streaming:
            async for answer in channel.unary_stream(path, **kinds)(request, **options):
                if method.name == "Delete" and answer.deletion.refusal:
                    return str({"NOT_ALLOWED": "PERMISSION_DENIED"}.get(answer.deletion.reason, answer.deletion.reason))
        else:
            await channel.unary_unary(path, **kinds)(request, **options)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
