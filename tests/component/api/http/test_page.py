"""The web page: self-contained, and locked to exactly its own script and style."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any


async def test_the_page_loads_nothing_from_elsewhere(connect: Any) -> None:
    answer = await connect().get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""(?:src|href)=["']?(?!data:)[^"'>]""", answer.text)
    assert set(re.findall(r"https?://[^\s\"')]+", answer.text)) == {"http://www.w3.org/2000/svg"}


async def test_the_policy_names_the_script_and_style_that_are_there(connect: Any) -> None:
    answer = await connect().get("/")
    policy = answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


async def test_nothing_the_policy_would_block(connect: Any) -> None:
    text = (await connect().get("/")).text
    assert not re.findall(r"<[^>]+\s(?:on\w+|style)=", text)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert sink not in text


async def test_every_path_the_page_asks_for_exists(connect: Any) -> None:
    text = (await connect().get("/")).text
    asked = {re.sub(r"\$\{[^}]*\}", "x", path).split("?")[0] for path in re.findall(r'[`"](/horizon/v1/[^`"]*)', text)}
    assert len(asked) >= 5
    for path in asked:
        answer = await connect().get(path)
        assert answer.status_code == 401, path  # asked for a token, so the route is there
