"""The signature of webhooks is the one of the specification."""

from __future__ import annotations

import pytest

from horizon_server.errors import InvalidSpec
from horizon_server.services.webhooks.payload import check_secret, headers_of, new_secret


def test_the_signature_is_that_of_the_published_example() -> None:
    headers = headers_of(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        '{"test": 2432232314}',
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        1614265330.7,
    )
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_short", "whsec_!", "A" * 44, "whsec_" + "A" * 88 + "AAAA"])
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    check_secret(new_secret())
    with pytest.raises(InvalidSpec, match=r"whsec_ and 24 to 64 random bytes in base64"):
        check_secret(secret)
