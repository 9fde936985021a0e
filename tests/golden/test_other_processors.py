"""The golden tests as other processors would run them: the libraries' own switches choose other kernels on this one.

Kernels differ in the order of their sums, and so in the last bits; what is judged by float64 passes with all of them. A
part of the tests runs as on the oldest processor, and with `make test-all` all of those that are cheap, as on each kind
and with each switch by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import INSIDE_A_TEST, TEST_ALL
from tests.support.further import further

TESTS = Path(__file__).parent
WIDE = bool(os.environ.get(TEST_ALL))

# Of MKL, MKL_ENABLE_INSTRUCTIONS does nothing on processors of AMD; MKL_CBWR chooses kernels on all.
PROCESSORS: dict[str, dict[str, str]] = {
    "no vectors, one thread": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
    },
    "avx2, two threads": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "OMP_NUM_THREADS": "2",
    },
    "avx512 with bf16, four threads": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "OMP_NUM_THREADS": "4",
    },
}
SWITCHES: dict[str, dict[str, str]] = {
    f"{name}={value}": {name: value}
    for name, values in {
        "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
        "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"),
        "MKL_CBWR": ("COMPATIBLE", "AVX2", "AVX512"),
        "MKL_ENABLE_INSTRUCTIONS": ("AVX2", "AVX512"),
        "OMP_NUM_THREADS": ("1", "2", "4"),
    }.items()
    for value in values
}

PART = (
    "test_gradients.py::test_packed_documents_give_the_gradients_of_plain_autograd[gemma3_text]",
    "test_gradients.py::test_packed_documents_give_the_gradients_of_plain_autograd[qwen3_moe]",
    "test_gradients.py::test_a_model_that_mixes_packed_documents_is_found_out_and_fed_single_ones[qwen3_next]",
    "test_gradients.py::test_the_embedding_of_the_padding_token_gets_the_gradient_of_plain_autograd[qwen3]",
    "test_references.py::test_the_first_steps_forward_gives_the_same_bits",
    "test_trl.py::test_steps_are_those_of_trl[dpo]",
    "test_lora.py::test_steps_are_those_of_peft[llama]",
)
CHEAP = (
    "test_gradients.py",
    "test_references.py",
    "test_trl.py",
    "test_lora.py",
    "test_training.py",
    "test_trainable.py",
    "test_objectives.py",
    "test_weighted_messages.py",
    "test_packed_adapters.py",
    "test_label_smoothing.py",
    "test_neftune.py",
    "test_dropout.py",
    "test_noise_scale.py",
    "test_lr_groups.py",
    "test_model_folders.py",
    "test_evaluations.py",
)


def is_known_here(switches: dict[str, str]) -> bool:
    """Whether this processor has what torch is told to use. It would not look, and stop at the first instruction that
    is not there."""
    flags = Path("/proc/cpuinfo").read_text().split()
    needed = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    return needed.get(switches.get("ATEN_CPU_CAPABILITY", ""), set()) <= set(flags)


@pytest.mark.timeout(3600 if WIDE else 600)
@pytest.mark.parametrize(
    "name", ["no vectors, one thread", *further("avx2, two threads", "avx512 with bf16, four threads", *SWITCHES)]
)
def test_the_golden_tests_pass_as_on_another_processor(name: str) -> None:
    switches = {**PROCESSORS, **SWITCHES}[name]
    if not is_known_here(switches):
        pytest.skip(f"this processor has no {switches['ATEN_CPU_CAPABILITY']}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, *(str(TESTS / test) for test in (CHEAP if WIDE else PART))],
        env={**environment, **switches, INSIDE_A_TEST: "1"},
        cwd=TESTS.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3500 if WIDE else 580,
        check=False,
    )
    assert done.returncode == 0, f"with {switches}:\n{done.stdout[-8000:]}"
