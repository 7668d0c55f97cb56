"""The build without a compiler run: is the CUDA backend optional, and does the demo show progress?"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def output_of(*command: str, text: str = "") -> str:
    done = subprocess.run(
        command, input=text.encode(), check=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode()


@pytest.mark.parametrize(("option", "is_built"), [([], HAS_GPU), (["-DKVREPLAY_CUDA=ON"], True)])
def test_the_cuda_backend_is_built_for_a_gpu_or_on_request(option: list[str], is_built: bool) -> None:
    text = output_of("cmake", *option, "-P", "cuda/language.cmake")
    assert text == ("" if is_built else "-- Without the CUDA backend; to build it, use -DKVREPLAY_CUDA=ON\n")


def test_the_demo_shows_the_steps_of_the_build() -> None:
    function = output_of("sed", "-n", "/^ *show_progress()/,/^ *}/p", "tools/demo")
    text = "-- Configuring done\n[1/20] Building CXX object a.o\n[20/20] Linking CXX executable kvreplay\n"
    steps = output_of("bash", "-euc", function + "show_progress", text=text)
    assert steps == "\rdemo: building [1/20]\rdemo: building [20/20]\n"
