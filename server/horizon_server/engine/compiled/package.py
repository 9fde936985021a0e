"""A kind of layer's machine code in one file, made by TorchInductor ahead of time, and loaded without it.

Source: AOTInductor, https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# Unused ones register operators: code that calls what nothing has registered cannot be loaded.
from horizon_server.engine import linear  # noqa: F401
from horizon_server.engine.attention import kernels  # noqa: F401
from horizon_server.engine.compiled import sums  # noqa: F401
from horizon_server.engine.compiled.call_pattern import NotCompilable
from horizon_server.engine.compiled.cpp_compiler import with_torchs_runtime
from horizon_server.engine.fused import rms_norm, rotary, swiglu  # noqa: F401

if TYPE_CHECKING:  # tracing loads the compiler, which a process that only runs the code does without
    from horizon_server.engine.compiled.graphs import Graph, LayerGraphs

_FORWARD, _BACKWARD = "forward", "backward"
_ONE_THREAD = True


class CompilerFailed(NotCompilable):
    """There is no compiler, or it does not take the code, or what it made cannot be loaded."""


class LayerCode:
    """The two functions of a package, as `LayerGraphs` describes them. Call them without gradients, on the compute
    queue.

    Raises:
        CompilerFailed: the package cannot be loaded here.
    """

    def __init__(self, path: Path) -> None:
        # The loader itself: the function around it imports the compiler, for seconds, to check what this machine can
        # run.
        loader = torch._C._aoti.AOTIModelPackageLoader
        # Run by one thread at a time: a loader for several would wait, with Python's lock in hand, until the device has
        # ended the run before (pytorch#197516), so that the host could never run ahead of a GPU.
        try:
            self._forward = loader(str(path), _FORWARD, _ONE_THREAD, 1, -1)
            self._backward = loader(str(path), _BACKWARD, _ONE_THREAD, 1, -1)
        except RuntimeError as error:
            raise CompilerFailed(f"its code cannot be loaded ({_first_line(error)})") from error

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The layer's output, and the products of one that keeps them. The list of inputs is emptied."""
        outputs: list[Tensor] = self._forward.boxed_run(inputs)
        return outputs

    def backward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The gradient of the hidden state and of the returned parameters. The list of inputs is emptied."""
        gradients: list[Tensor] = self._backward.boxed_run(inputs)
        return gradients


def build_package(graphs: LayerGraphs, path: Path) -> None:
    """Compile both graphs into the file `path`.

    Raises:
        CompilerFailed: there is no compiler, or it does not take the code.
    """
    # Here, because only the process that compiles needs it: it takes seconds and hundreds of megabytes.
    from torch._inductor import config
    from torch._inductor.package.package import package_aoti

    try:
        # The last of the names that TorchInductor tries: CXX, or g++.
        compiler = with_torchs_runtime(config.cpp.cxx[-1], path.parent / "compiler")
        files: dict[str, Any] = {
            _FORWARD: _compiled(graphs.forward, compiler),
            _BACKWARD: _compiled(graphs.backward, compiler),
        }
        package_aoti(str(path), files)
    except Exception as error:  # The compiler raises whatever its own tools do.
        raise CompilerFailed(f"the compiler failed ({type(error).__name__}: {_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next((line[:300] for line in str(error).splitlines() if line.strip()), "no message")


def _compiled(graph: Graph, compiler: str) -> list[Any]:
    from torch._inductor.compile_fx import compile_fx_aot
    from torch.fx.experimental import _config as shape_config

    settings = {
        "aot_inductor.package": True,
        "cpp.cxx": (compiler,),
        # Headers are most of what the wrapper's compiler reads, and its own speed hardly matters: it calls kernels.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        # /proc/cpuinfo says what the processor has. Compiling and loading a trial of every extension takes half a
        # minute.
        "cpp.vec_isa_ok": True,
        # Of 300 MB, to save a few seconds.
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
    }
    # Without it, the compiler's choices for the traced number of tokens become conditions that exclude others.
    with torch.no_grad(), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        files = compile_fx_aot(graph.module, list(graph.inputs), config_patches=settings)
    assert isinstance(files, list)
    return files
