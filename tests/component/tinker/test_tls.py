"""A daemon with a certificate of its own: the SDK trusts the file that SSL_CERT_FILE names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pushed_state import MODEL, PushedState

from horizon_server.network import own_certificate

PROGRAM = """
import sys, tinker
with tinker.ServiceClient() as service:
    print(service.holder.get_session_id())
models = tinker.RestClient().get_server_capabilities().result(60).supported_models
print([model.model_name for model in models])
"""


def test_the_sdk_trusts_the_certificate_that_it_is_told_to(tmp_path: Path, pushed: PushedState) -> None:
    made = own_certificate(tmp_path / "tls", ())
    daemon = pushed.daemon(tmp_path / "state", tls_cert=str(made.certificate), tls_key=str(made.key))
    daemon.start()
    try:
        environment = os.environ | {
            "TINKER_BASE_URL": f"https://{daemon.endpoints['http']}",
            "TINKER_API_KEY": f"tml-{daemon.user('ada')}",
            "SSL_CERT_FILE": str(made.authority),
        }
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    finally:
        daemon.close()
    assert done.returncode == 0, done.stderr
    assert MODEL in done.stdout
